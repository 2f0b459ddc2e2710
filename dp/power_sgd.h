#pragma once

#include <torch/arg.h>

#include <cstdint>

#include "dp/comm_hooks.h"

namespace smp::dp {

/// Options of `power_sgd_hook`; names and defaults are those of PyTorch's PowerSGDState.
struct PowerSGDOptions {
  /// Rank of the approximation: more is slower and nearer to the gradient.
  TORCH_ARG(int64_t, matrix_approximation_rank) = 1;
  /// Iterations that reduce without compression first; 2 or more, since buckets are rebuilt after
  /// the first.
  TORCH_ARG(int64_t, start_iter) = 1000;
  /// A gradient is compressed where that makes it smaller by more than this factor.
  TORCH_ARG(double, min_compression_rate) = 2;
  /// Add what compression lost to the gradient of the next iteration.
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
/// its own, for one model.
CommHook power_sgd_hook(const PowerSGDOptions& options = {});

}  // namespace smp::dp
