// SPDX-License-Identifier: Apache-2.0
#include "comm/device/staging.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <memory>
#include <utility>

namespace smp::comm {
namespace {

class StagedWork final : public Work {
 public:
  StagedWork(WorkPtr work, at::Tensor staged, at::Tensor result)
      : work_(std::move(work)), staged_(std::move(staged)), result_(std::move(result)) {}

  bool test() override { return work_->test(); }

  void wait() override {
    work_->wait();
    if (const at::Tensor result = std::exchange(result_, at::Tensor()); result.defined()) {
      const at::NoGradGuard no_grad;
      result.copy_(staged_);
    }
  }

 private:
  const WorkPtr work_;
  const at::Tensor staged_;
  at::Tensor result_;
};

}  // namespace

at::Tensor staged_copy(const at::Tensor& tensor) { return tensor.detach().cpu().contiguous(); }

at::Tensor staging_room(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()));
}

WorkPtr staged_work(WorkPtr work, const at::Tensor& staged, const at::Tensor& result) {
  return std::make_shared<StagedWork>(std::move(work), staged, result);
}

}  // namespace smp::comm
