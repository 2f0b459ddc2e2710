// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tools/train/data.h"
#include "tools/train/options.h"

namespace smp::tools::train {

/// The input of one step: this replica's share of a batch.
struct Batch {
  std::vector<at::Tensor> inputs;  ///< in the order of `--inputs`
  at::Tensor target;               ///< undefined for LossKind::kOutput
  at::Tensor tokens;               ///< how many numbers of the whole batch count; else undefined
};

/// The batches of a file. Samples that do not fill one are left out, at the end of each epoch.
/// Needs `smp::init`.
class Batches {
 public:
  /// Throws as `Samples`, and `UsageError` where the samples do not fill a batch.
  Batches(const Options& options, const std::string& path, const std::string& labels);

  /// How many an epoch has.
  int64_t count() const { return samples_.size() / options_.batch_size; }

  /// That of a training step, counted from 0, in the shuffled order of its epoch. Collective over
  /// the replicas, as the next one.
  Batch of_step(int64_t step);
  /// The `number`-th in the order of the file.
  Batch in_order(int64_t number) const;

 private:
  Batch at(const at::Tensor& indices) const;

  const Options options_;
  const Samples samples_;
  int64_t epoch_ = -1;
  at::Tensor order_;  // order of that epoch
};

}  // namespace smp::tools::train
