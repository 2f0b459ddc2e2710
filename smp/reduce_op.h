// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "smp/export.h"

namespace smp {

/// How elements of several ranks are combined. Every reduction combines in ascending rank order
/// within the group, element by element, so the result has the same bits on every rank, in every
/// run and however the ranks lie on hosts: ((rank 0 + rank 1) + rank 2) + ... Only with
/// `"numerics": "fast"` NCCL reduces tensors of GPUs in an order of its own (docs/cuda.md).
///
/// float16 and bfloat16 are combined in float32 and rounded once; integers wrap. Complex numbers
/// have sums and averages.
enum class ReduceOp {
  kSum,
  kAverage,  ///< The sum, divided once by the number of ranks. Not of integers.
  kMin,
  kMax,  ///< Minimum and maximum keep NaN, as `at::minimum` does.
  kProduct,
  kBitAnd,  ///< Bitwise: integers and bool.
  kBitOr,
  kBitXor,
};

/// "sum", "average", ...
SMP_API const char* to_string(ReduceOp op);

}  // namespace smp
