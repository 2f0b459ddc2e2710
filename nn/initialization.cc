// SPDX-License-Identifier: Apache-2.0
#include "nn/initialization.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include <cmath>

#include "core/check.h"

namespace smp::nn {

void check_divides(const char* module, const char* name, int64_t size, int ranks, int64_t blocks) {
  SMP_CHECK_WITH(
      UsageError, size > 0 && size % (blocks * ranks) == 0, module, ": ", name, " ", size,
      blocks > 1 ? c10::str(" in ", blocks, " blocks") : "", " cannot be divided among the ", ranks,
      " ranks of the tensor-parallel group. Choose a tensor_parallel_degree that divides "
      "it, or another ",
      name);
}

void draw_part(const at::Tensor& part, const ParameterSplit& split, int rank,
               const std::function<void(at::Tensor)>& draw) {
  const at::NoGradGuard no_grad;
  if (split.ranks == 1) {
    draw(part);
    return;
  }
  const at::Tensor whole = at::empty(split.sizes, part.options().requires_grad(false));
  draw(whole);
  part.copy_(split.part(whole, rank));
}

void draw_linear(const at::Tensor& weight, const ParameterSplit& of_weight, const at::Tensor& bias,
                 const ParameterSplit& of_bias, int rank, std::optional<double> std) {
  draw_part(weight, of_weight, rank, [&](const at::Tensor& whole) {
    if (std) {
      torch::nn::init::normal_(whole, 0, *std);
    } else {
      torch::nn::init::kaiming_uniform_(whole, std::sqrt(5));
    }
  });
  if (!bias.defined()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(of_weight.sizes[1]));
  draw_part(bias, of_bias, rank,
            [&](const at::Tensor& whole) { torch::nn::init::uniform_(whole, -bound, bound); });
}

}  // namespace smp::nn
