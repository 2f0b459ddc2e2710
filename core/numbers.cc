// SPDX-License-Identifier: Apache-2.0
#include "core/numbers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

namespace smp::core {

std::vector<double> read_numbers(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<double> numbers(tensors.size());
  std::vector<at::Tensor> elsewhere;
  std::vector<size_t> places;
  bool are_alike = true;  // in their type
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].is_cpu()) {
      numbers[i] = tensors[i].item<double>();
    } else {
      elsewhere.push_back(tensors[i].detach().view({1}));
      places.push_back(i);
      are_alike = are_alike && elsewhere.back().dtype() == elsewhere.front().dtype();
    }
  }
  if (elsewhere.empty()) return numbers;
  if (!are_alike) {
    for (at::Tensor& tensor : elsewhere) tensor = tensor.to(at::kDouble);
  }
  const at::Tensor all = at::cat(elsewhere).cpu().to(at::kDouble);
  for (size_t i = 0; i < places.size(); ++i) {
    numbers[places[i]] = all.const_data_ptr<double>()[i];
  }
  return numbers;
}

}  // namespace smp::core
