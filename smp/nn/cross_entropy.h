// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/loss.h>
#include <torch/nn/pimpl.h>

#include <ostream>

#include "smp/export.h"

namespace smp::nn {

/// Cross entropy of logits whose classes are divided among the ranks of the tensor-parallel group,
/// with the options of torch's: `divided_cross_entropy` in smp/nn/operators.h. Logits [N, C /
/// ranks] or [N, C / ranks, d1, ...]; class indices of the whole [N, d1, ...]. The logits are never
/// gathered.
SMP_API at::Tensor vocab_parallel_cross_entropy(
    const at::Tensor& logits, const at::Tensor& target,
    const torch::nn::CrossEntropyLossOptions& options = {});

/// The same as a module; the options' weight is its buffer "weight".
class SMP_API VocabParallelCrossEntropyLossImpl
    : public torch::nn::Cloneable<VocabParallelCrossEntropyLossImpl> {
 public:
  explicit VocabParallelCrossEntropyLossImpl(torch::nn::CrossEntropyLossOptions options = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& logits, const at::Tensor& target);

  torch::nn::CrossEntropyLossOptions options;
  at::Tensor weight;  ///< weight of each class, whole; undefined without
};
TORCH_MODULE(VocabParallelCrossEntropyLoss);

}  // namespace smp::nn
