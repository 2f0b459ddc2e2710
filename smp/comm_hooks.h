// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "smp/export.h"
#include "smp/group.h"

namespace smp {

/// A bucket whose gradients are complete on this rank: the argument of a communication hook.
struct GradBucket {
  size_t index;  ///< Buckets come in ascending order, the same on all ranks.
  size_t count;  ///< The number of buckets.
  /// The gradients one after the other, flat, with zeros in the gaps between them.
  at::Tensor buffer;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;  ///< Slices of `buffer`, as the parameters lie in memory.
  std::vector<std::string> names;     ///< Names of the bucket's parameters.
  Group group;                        ///< Between the replicas.
  double divisor;  ///< Divides the sum to a mean: the number of replicas, see `JoinOptions`.

  bool is_last() const { return index + 1 == count; }
};

/// Starts to replace `buffer` by the value that is to become the gradient, commonly the mean over
/// the ranks; when the work has been waited for, it is there. Called on all ranks for the same
/// buckets in the same order, then all works are waited for in that order, so that both may call
/// collectives of `group`.
using CommHook = std::function<WorkPtr(const GradBucket& bucket)>;

/// The hook that is used if none is given: sums in rank order, divides once; half precision is
/// rounded at the end.
SMP_API WorkPtr all_reduce_hook(const GradBucket& bucket);

/// Casts the gradients to float16, divides, sums in rank order (in float32, rounded once) and casts
/// back: half the traffic. As PyTorch's hook of that name.
SMP_API WorkPtr fp16_compress_hook(const GradBucket& bucket);

/// The same in bfloat16.
SMP_API WorkPtr bf16_compress_hook(const GradBucket& bucket);

/// Options of `power_sgd_hook`; names and defaults are those of PyTorch's PowerSGDState.
struct PowerSGDOptions {
  /// Rank of the approximation: more is slower and nearer to the gradient.
  TORCH_ARG(int64_t, matrix_approximation_rank) = 1;
  /// Iterations that reduce without compression first; 2 or more, since buckets are rebuilt after
  /// the first.
  TORCH_ARG(int64_t, start_iter) = 1000;
  /// A gradient is compressed where that makes it smaller by more than this factor.
  TORCH_ARG(double, min_compression_rate) = 2;
  /// Add the losses of compression to the gradient of the next iteration.
  TORCH_ARG(bool, use_error_feedback) = true;
  /// Begin each approximation with the one before.
  TORCH_ARG(bool, warm_start) = true;
  /// Added to norms in the orthogonalization; for gradients that may be nearly zero.
  TORCH_ARG(double, orthogonalization_epsilon) = 0;
  /// Seed of the first approximations (of all, without `warm_start`); the same on all ranks.
  TORCH_ARG(uint64_t, random_seed) = 0;
};

/// Compresses gradients to matrices of low rank: PowerSGD (Vogels, Karimireddy and Jaggi, 2019).
/// For a gradient M as a matrix (its first axis against the others) and its last Q:
///
///     P = sum over ranks of M Q, orthonormalized;  Q = mean over ranks of M^T P;  M becomes P Q^T
///
/// Gradients that would not become smaller, those of vectors for instance, are averaged as they
/// are. Results are the same on all ranks and in every run. Each call gives a hook with a state of
/// its own, for one model. Throws `UsageError` for a rank below 1 or a `start_iter` below 2.
SMP_API CommHook power_sgd_hook(const PowerSGDOptions& options = {});

}  // namespace smp
