// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/reduce_parts.h"

#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include "core/check.h"

namespace smp::comm {
namespace {

at::Tensor combine(const at::Tensor& left, const at::Tensor& right, ReduceOp op) {
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
  SMP_INTERNAL_ASSERT(false, "reduction number ", static_cast<int>(op));
}

}  // namespace

at::Tensor reduce_parts(const at::Tensor& parts, ReduceOp op) {
  if (parts.is_complex()) {  // which divides both parts of a number by a real one, as the host does
    return at::view_as_complex(reduce_parts(at::view_as_real(parts), op));
  }
  const at::ScalarType dtype = parts.scalar_type();
  const at::ScalarType wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  at::Tensor result = parts[0].to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (int64_t rank = 1; rank < parts.size(0); ++rank) {
    result = combine(result, parts[rank].to(wide), op);
  }
  if (op == ReduceOp::kAverage) {
    result = at::div(result, parts.size(0));
  }
  return result.to(dtype);
}

}  // namespace smp::comm
