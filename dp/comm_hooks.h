#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace smp::dp {

/// A bucket whose gradients are complete on this rank: what a communication hook is given.
struct GradBucket {
  size_t index;  ///< Buckets come in ascending order, the same on all ranks.
  size_t count;  ///< Of all buckets.
  /// The gradients one after the other, flat, with zeros in the gaps between them.
  at::Tensor buffer;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;  ///< Slices of `buffer`, as the parameters lie in memory.
  std::vector<std::string> names;     ///< Of the parameters.
  comm::CommunicatorPtr group;        ///< Between the replicas.
  double divisor;  ///< What makes the sum a mean: the number of replicas, see `JoinOptions`.

  bool is_last() const { return index + 1 == count; }
};

/// Starts to replace `buffer` by what is to become the gradient, commonly the mean over the ranks;
/// when the work has been waited for, it is there. Called on all ranks for the same buckets in the
/// same order, then all works are waited for in that order, so that both may call collectives of
/// `group`.
using CommHook = std::function<comm::WorkPtr(const GradBucket& bucket)>;

/// Work that calls `next` once, in `wait()`, when `work` is complete.
comm::WorkPtr then(comm::WorkPtr work, std::function<void()> next);

/// What happens without a hook: sums in rank order, divides once; half precision is rounded at the
/// end.
comm::WorkPtr all_reduce_hook(const GradBucket& bucket);

/// Casts the gradients to float16, divides, sums in rank order (in float32, rounded once) and casts
/// back: half the traffic. As PyTorch's hook of that name.
comm::WorkPtr fp16_compress_hook(const GradBucket& bucket);

/// The same in bfloat16.
comm::WorkPtr bf16_compress_hook(const GradBucket& bucket);

}  // namespace smp::dp
