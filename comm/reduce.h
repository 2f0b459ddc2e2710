// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <string>
#include <vector>

#include "comm/collective.h"

namespace smp::comm {

/// True when elements of `dtype` can be combined with `op`: all floating point and integer types by
/// sum, minimum, maximum and product; floating point by average; integers bitwise; bool bitwise, by
/// minimum (and) and maximum (or); complex numbers (of float or double) by sum and average.
bool can_reduce(c10::ScalarType dtype, ReduceOp op);

/// Throws the `UsageError` of operation `verb` on group `group` where it cannot.
void check_can_reduce(const std::string& group, const char* verb, c10::ScalarType dtype,
                      ReduceOp op);

// The arithmetic calls no operator of libtorch, so that it may run on any thread and is never
// recorded.

/// Writes ((parts[0] op parts[1]) op parts[2]) ... to each of `outputs`, element by element; an
/// average is divided by `divisor`. An output may be one of the parts.
void reduce_in_order(const std::vector<void*>& outputs, const std::vector<const void*>& parts,
                     size_t elements, c10::ScalarType dtype, ReduceOp op, int divisor);

// The same in several goes, for parts that are never in one place. The intermediate result has the
// type in which elements are accumulated: float32 for float16 and bfloat16.

/// Bytes of an accumulator.
size_t accumulator_bytes(c10::ScalarType dtype);

/// Combines `parts` in order, after the content of `accumulators` if `continues`.
void accumulate_in_order(void* accumulators, bool continues, const std::vector<const void*>& parts,
                         size_t elements, c10::ScalarType dtype, ReduceOp op);

/// Rounds, and divides an average by `divisor`.
void finish_reduction(void* output, const void* accumulators, size_t elements,
                      c10::ScalarType dtype, ReduceOp op, int divisor);

}  // namespace smp::comm
