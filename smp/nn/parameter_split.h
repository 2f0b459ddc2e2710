// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "smp/export.h"

namespace smp::nn {

/// How a parameter is divided among the ranks of a tensor-parallel group: dimension `dim` is seen
/// as `blocks` equal blocks, one after the other, and rank r holds the r-th of `ranks` equal parts
/// of each block. One block divides rows or columns; three blocks divide a fused projection to
/// queries, keys and values so that every rank has its heads of all three.
struct SMP_API ParameterSplit {
  std::vector<int64_t> sizes;  ///< sizes of the whole parameter
  int64_t dim = 0;
  int64_t blocks = 1;
  int ranks = 1;

  /// Throws `UsageError` unless `dim` is a dimension of `sizes` whose size is a multiple of
  /// `blocks * ranks`.
  void check() const;

  /// The sizes that each rank holds.
  std::vector<int64_t> local_sizes() const;

  /// Rank `rank`'s part of a tensor with `sizes`, as a contiguous copy.
  at::Tensor part(const at::Tensor& whole, int rank) const;

  /// The whole of all ranks' parts, in the order of the ranks.
  at::Tensor join(const std::vector<at::Tensor>& parts) const;

  /// "[192, 64] along dimension 0 over 2 ranks", with blocks "... in 3 blocks over 2 ranks".
  std::string to_string() const;

  bool operator==(const ParameterSplit& other) const;
  bool operator!=(const ParameterSplit& other) const { return !(*this == other); }
};

}  // namespace smp::nn
