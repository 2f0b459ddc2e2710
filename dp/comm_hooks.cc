// SPDX-License-Identifier: Apache-2.0
#include "smp/comm_hooks.h"

#include "dp/bucket_layout.h"

namespace smp {
namespace {

WorkPtr compressed(const GradBucket& bucket, at::ScalarType type) {
  const at::Tensor small = dp::as_real(bucket.buffer).to(type).div_(bucket.divisor);
  return then(bucket.group.async().all_reduce(small, ReduceOp::kSum),
              [small, buffer = dp::as_real(bucket.buffer)] { buffer.copy_(small); });
}

}  // namespace

WorkPtr all_reduce_hook(const GradBucket& bucket) {
  const at::Tensor buffer = dp::as_real(bucket.buffer);
  if (bucket.divisor == bucket.group.size()) {
    return bucket.group.async().all_reduce(buffer, ReduceOp::kAverage);
  }
  return then(bucket.group.async().all_reduce(buffer, ReduceOp::kSum),
              [buffer, divisor = bucket.divisor] {
                if (divisor != 1) buffer.div_(divisor);
              });
}

WorkPtr fp16_compress_hook(const GradBucket& bucket) { return compressed(bucket, at::kHalf); }

WorkPtr bf16_compress_hook(const GradBucket& bucket) { return compressed(bucket, at::kBFloat16); }

}  // namespace smp
