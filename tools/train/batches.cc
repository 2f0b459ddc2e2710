// SPDX-License-Identifier: Apache-2.0
#include "tools/train/batches.h"

#include <ATen/Functions.h>

#include "core/check.h"
#include "smp/group.h"
#include "smp/token_loss.h"
#include "tools/train/loss.h"
#include "tools/train/network.h"
#include "tools/train/order.h"

namespace smp::tools::train {
namespace {

std::vector<std::string> tensors_of(const Options& options) {
  std::vector<std::string> names;
  for (const InputName& input : read_inputs(options.inputs)) names.push_back(input.tensor);
  if (options.loss.kind != LossKind::kOutput) names.push_back(options.target);
  return names;
}

}  // namespace

Batches::Batches(const Options& options, const std::string& path, const std::string& labels)
    : options_(options), samples_(options.reading, path, labels, tensors_of(options)) {
  SMP_CHECK_WITH(UsageError, count() > 0, "the data \"", path, "\" has ", samples_.size(),
                 " samples, fewer than a batch of ", options.batch_size,
                 ". Choose a smaller --batch-size");
}

Batch Batches::of_step(int64_t step) {
  const int64_t epoch = step / count();
  if (epoch != epoch_) {
    order_ = at::tensor(order_of(samples_.size(), options_.seed, static_cast<uint64_t>(epoch)),
                        at::kLong);
    epoch_ = epoch;
  }
  const int64_t size = options_.batch_size;
  return at(order_.narrow(0, step % count() * size, size));
}

Batch Batches::in_order(int64_t number) const {
  const int64_t first = number * options_.batch_size;
  return at(at::arange(first, first + options_.batch_size, at::kLong));
}

Batch Batches::at(const at::Tensor& indices) const {
  const at::Tensor own = shard(indices);
  Batch batch;
  for (const InputName& input : read_inputs(options_.inputs)) {
    batch.inputs.push_back(samples_.rows(input.tensor, own));
  }
  if (options_.loss.kind == LossKind::kOutput) return batch;
  batch.target = as_target(options_.loss, samples_.rows(options_.target, own));
  batch.tokens = count_tokens(counted(options_.loss, batch.target));
  return batch;
}

}  // namespace smp::tools::train
