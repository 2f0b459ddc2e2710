// SPDX-License-Identifier: Apache-2.0
#include "nn/linear_biases.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <vector>

namespace smp::nn {

at::Tensor alibi_slopes(int64_t heads, int64_t bias_max, const at::Tensor& like) {
  const at::TensorOptions options =
      like.options().dtype(at::toOpMathType(like.scalar_type())).requires_grad(false);
  int64_t power = 1;
  while (power < heads) power *= 2;
  std::vector<double> of_power;
  for (int64_t i = 1; i <= power; ++i) {
    of_power.push_back(std::exp2(-static_cast<double>(bias_max * i) / static_cast<double>(power)));
  }
  if (power == heads) return at::tensor(of_power, options);
  std::vector<double> slopes;
  for (int64_t i = 1; i < power; i += 2) slopes.push_back(of_power[i]);
  for (int64_t i = 0; i < power; i += 2) slopes.push_back(of_power[i]);
  slopes.resize(heads);
  return at::tensor(slopes, options);
}

at::Tensor linear_biases(const at::Tensor& slopes, int64_t queries, int64_t keys) {
  const at::TensorOptions options = slopes.options();
  const at::Tensor distance =
      (at::arange(keys, options) - at::arange(queries, options).unsqueeze(1)).abs();
  return distance.neg() * slopes.view({1, -1, 1, 1});
}

}  // namespace smp::nn
