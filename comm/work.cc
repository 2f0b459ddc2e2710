// SPDX-License-Identifier: Apache-2.0
#include "smp/work.h"

#include <utility>

namespace smp {
namespace {

class Continuation final : public Work {
 public:
  Continuation(WorkPtr work, std::function<void()> next)
      : work_(std::move(work)), next_(std::move(next)) {}

  bool test() override { return work_->test(); }

  void wait() override {
    work_->wait();
    if (next_) std::exchange(next_, nullptr)();
  }

 private:
  const WorkPtr work_;
  std::function<void()> next_;
};

}  // namespace

WorkPtr then(WorkPtr work, std::function<void()> next) {
  return std::make_shared<Continuation>(std::move(work), std::move(next));
}

}  // namespace smp
