// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/reduce_parts.h"

#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>

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

at::Tensor reduce_parts(const std::vector<at::Tensor>& parts, ReduceOp op) {
  const at::ScalarType dtype = parts[0].scalar_type();
  if (parts[0].is_complex()) {  // both parts of a number are divided by a real one, as on the host
    std::vector<at::Tensor> pairs(parts.size());
    std::transform(parts.begin(), parts.end(), pairs.begin(), at::view_as_real);
    return at::view_as_complex(reduce_parts(pairs, op));
  }
  const at::ScalarType wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  at::Tensor result = parts[0].to(wide);
  for (size_t rank = 1; rank < parts.size(); ++rank) {
    result = combine(result, parts[rank].to(wide), op);
  }
  if (op == ReduceOp::kAverage) {  // CUDA would multiply by the reciprocal of a number of the host
    const auto divisor = at::full({}, static_cast<int64_t>(parts.size()), result.options());
    result = at::div(result, divisor);
  }
  return result.to(dtype);
}

}  // namespace smp::comm
