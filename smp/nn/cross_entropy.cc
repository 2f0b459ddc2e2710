// SPDX-License-Identifier: Apache-2.0
#include "smp/nn/cross_entropy.h"

#include <torch/enum.h>

#include <utility>

#include "smp/nn/operators.h"

namespace smp::nn {

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                                        const torch::nn::CrossEntropyLossOptions& options) {
  const std::optional<at::Tensor> weight =
      options.weight().defined() ? std::optional(options.weight()) : std::nullopt;
  return divided_cross_entropy(logits, target, weight,
                               torch::enumtype::reduction_get_enum(options.reduction()),
                               options.ignore_index(), options.label_smoothing());
}

VocabParallelCrossEntropyLossImpl::VocabParallelCrossEntropyLossImpl(
    torch::nn::CrossEntropyLossOptions options_)
    : options(std::move(options_)) {
  VocabParallelCrossEntropyLossImpl::reset();
}

void VocabParallelCrossEntropyLossImpl::reset() {
  weight = register_buffer("weight", options.weight());
}

void VocabParallelCrossEntropyLossImpl::pretty_print(std::ostream& stream) const {
  stream << "smp::nn::VocabParallelCrossEntropyLoss()";
}

at::Tensor VocabParallelCrossEntropyLossImpl::forward(const at::Tensor& logits,
                                                      const at::Tensor& target) {
  auto with_buffer = options;
  return vocab_parallel_cross_entropy(logits, target, with_buffer.weight(weight));
}

}  // namespace smp::nn
