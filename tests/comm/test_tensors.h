// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <vector>

#include "comm/communicator.h"
#include "tests/error_of.h"

namespace smp::comm {

/// Values that differ by rank and element, with full mantissas; the same in every run.
inline at::Tensor values_of(int rank, int64_t elements, at::ScalarType dtype) {
  const at::Tensor index = at::arange(elements, at::kDouble) + 1000.0 * rank + 1.0;
  const at::Tensor values = at::sin(index * 12.9898) * 100.0;
  if (at::isComplexType(dtype)) return at::complex(values, at::cos(index) * 10.0).to(dtype);
  return dtype == at::kBool ? values > 0 : values.to(dtype);
}

inline at::Tensor combine_by_hand(const at::Tensor& left, const at::Tensor& right, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return at::add(left, right);
    case ReduceOp::kMin:
      return at::minimum(left, right);
    case ReduceOp::kMax:
      return at::maximum(left, right);
    case ReduceOp::kProduct:
      return at::mul(left, right);
    case ReduceOp::kBitAnd:
      return at::bitwise_and(left, right);
    case ReduceOp::kBitOr:
      return at::bitwise_or(left, right);
    case ReduceOp::kBitXor:
      return at::bitwise_xor(left, right);
  }
  return at::Tensor();
}

/// The reduction written down with libtorch's operators, in rank order.
inline at::Tensor reduce_by_hand(const std::vector<at::Tensor>& parts, ReduceOp op) {
  const at::ScalarType dtype = parts[0].scalar_type();
  if (at::isComplexType(dtype)) {
    std::vector<at::Tensor> pairs;
    for (const at::Tensor& part : parts) pairs.push_back(at::view_as_real(part));
    return at::view_as_complex(reduce_by_hand(pairs, op));
  }
  const bool reduced = dtype == at::kHalf || dtype == at::kBFloat16;
  at::Tensor result = reduced ? parts[0].to(at::kFloat) : parts[0].clone();
  for (size_t i = 1; i < parts.size(); ++i) {
    result = combine_by_hand(result, parts[i].to(result.scalar_type()), op);
  }
  if (op == ReduceOp::kAverage) {
    result = at::div(result, static_cast<int64_t>(parts.size()));
  }
  return result.to(dtype);
}

/// Whether the operation exists for the type.
inline bool is_defined(at::ScalarType dtype, ReduceOp op) {
  const bool bitwise = op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
  if (at::isComplexType(dtype)) {
    return op == ReduceOp::kSum || op == ReduceOp::kAverage;
  }
  if (dtype == at::kBool) {
    return op != ReduceOp::kAverage;
  }
  return at::isFloatingType(dtype) ? !bitwise : op != ReduceOp::kAverage;
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

inline std::vector<at::Tensor> values_of_all(int size, int64_t elements, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back(values_of(rank, elements, dtype));
  }
  return parts;
}

using smp::testing::error_of;

}  // namespace smp::comm
