#include "dp/comm_hooks.h"

#include <utility>

#include "dp/bucket_layout.h"

namespace smp::dp {
namespace {

class Continuation final : public comm::Work {
 public:
  Continuation(comm::WorkPtr work, std::function<void()> next)
      : work_(std::move(work)), next_(std::move(next)) {}

  bool test() override { return work_->test(); }

  void wait() override {
    work_->wait();
    if (next_) std::exchange(next_, nullptr)();
  }

 private:
  const comm::WorkPtr work_;
  std::function<void()> next_;
};

comm::WorkPtr compressed(const GradBucket& bucket, at::ScalarType type) {
  const at::Tensor small = as_real(bucket.buffer).to(type).div_(bucket.divisor);
  return then(bucket.group->async().all_reduce(small, comm::ReduceOp::kSum),
              [small, buffer = as_real(bucket.buffer)] { buffer.copy_(small); });
}

}  // namespace

comm::WorkPtr then(comm::WorkPtr work, std::function<void()> next) {
  return std::make_shared<Continuation>(std::move(work), std::move(next));
}

comm::WorkPtr all_reduce_hook(const GradBucket& bucket) {
  const at::Tensor buffer = as_real(bucket.buffer);
  if (bucket.divisor == bucket.group->size()) {
    return bucket.group->async().all_reduce(buffer, comm::ReduceOp::kAverage);
  }
  return then(bucket.group->async().all_reduce(buffer, comm::ReduceOp::kSum),
              [buffer, divisor = bucket.divisor] {
                if (divisor != 1) buffer.div_(divisor);
              });
}

comm::WorkPtr fp16_compress_hook(const GradBucket& bucket) { return compressed(bucket, at::kHalf); }

comm::WorkPtr bf16_compress_hook(const GradBucket& bucket) {
  return compressed(bucket, at::kBFloat16);
}

}  // namespace smp::dp
