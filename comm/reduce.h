#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace smp::comm {

/// True when `reduce_in_order` can combine elements of `dtype` with `op`: all floating point and
/// integer types with every operation, and bool with kMin (and) and kMax (or).
bool can_reduce(c10::ScalarType dtype, ReduceOp op);

/// Throws the `UsageError` of group `group` where it cannot.
void check_can_reduce(const std::string& group, c10::ScalarType dtype, ReduceOp op);

/// Writes ((parts[0] op parts[1]) op parts[2]) ... to `output`, element by element. `output` may be
/// one of the parts. float16 and bfloat16 are accumulated in float32 and rounded once; integers
/// wrap; minimum and maximum keep NaN, as `at::minimum` does. The arithmetic calls no operator of
/// libtorch, so that it may run on any thread and is never recorded.
void reduce_in_order(void* output, const std::vector<const void*>& parts, size_t elements,
                     c10::ScalarType dtype, ReduceOp op);

}  // namespace smp::comm
