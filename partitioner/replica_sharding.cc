// SPDX-License-Identifier: Apache-2.0
#include "partitioner/replica_sharding.h"

namespace smp::partitioner {

int64_t gradient_bytes(const graph::Value& parameter) {
  const at::ScalarType type = parameter.meta.dtype;
  const bool is_half = type == at::kHalf || type == at::kBFloat16;
  return parameter.meta.numel() * static_cast<int64_t>(elementSize(is_half ? at::kFloat : type));
}

bool ReplicaSharding::divides(const graph::Value& parameter) const {
  if (parameters() == 1 || parameter.kind != graph::ValueKind::kParameter) return false;
  return names() ? names()->count(parameter.name) > 0 : parameter.meta.numel() >= smallest();
}

}  // namespace smp::partitioner
