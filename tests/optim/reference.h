// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <random>
#include <vector>

// Published formulas on plain numbers, to compare optimizers with.
namespace smp::optim::testing {

using Numbers = std::vector<double>;

inline double l2_norm(const Numbers& numbers) {
  double sum = 0;
  for (double number : numbers) sum += number * number;
  return std::sqrt(sum);
}

inline double largest(const Numbers& numbers) {
  double result = 0;
  for (double number : numbers) result = std::max(result, std::abs(number));
  return result;
}

inline Numbers draw(size_t count, unsigned seed, double scale = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0, scale);
  Numbers result(count);
  for (double& number : result) number = normal(generator);
  return result;
}

inline torch::Tensor to_tensor(const Numbers& numbers, torch::Dtype dtype = torch::kDouble) {
  return torch::tensor(numbers, torch::kDouble).to(dtype);
}

inline Numbers to_numbers(const torch::Tensor& tensor) {
  const auto flat = tensor.detach().to(torch::kDouble).contiguous();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

}  // namespace smp::optim::testing
