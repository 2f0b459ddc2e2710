// SPDX-License-Identifier: Apache-2.0
#include "runtime/precision.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <vector>

#include "graph/deferred.h"
#include "graph/recording.h"

namespace smp::runtime {

std::optional<at::ScalarType> half_type(const Config& config) {
  if (config.fp16()) return at::kHalf;
  if (config.bf16()) return at::kBFloat16;
  return std::nullopt;
}

void convert_module(const torch::nn::Module& module, at::ScalarType type) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  // Tensors without data are converted when they are made.
  std::optional<graph::DeferredScope> delayed;
  if (std::any_of(tensors.begin(), tensors.end(), graph::is_deferred)) {
    delayed.emplace(graph::DeferredOptions().eager_bytes(0));
  }
  for (at::Tensor& tensor : tensors) {
    if (tensor.is_floating_point() && tensor.scalar_type() != type) {
      tensor.set_data(tensor.detach().to(type));
    }
  }
}

}  // namespace smp::runtime
