// SPDX-License-Identifier: Apache-2.0
#include "runtime/attendance.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>

#include "core/check.h"
#include "core/public_call.h"
#include "core/status.h"
#include "core/wait_watch.h"

namespace smp::runtime {
namespace {

constexpr std::chrono::milliseconds kPeriod{1000};

}  // namespace

Attendance::Attendance(comm::Communicator& group)
    : group_(group),
      period_(std::min(kPeriod, group.timeout() / 4)),
      served_(core::this_server() == nullptr ? this : core::this_server()) {
  if (group_.size() == 1) return;
  thread_ = std::thread([this, context = core::error_context(), call = core::this_public_call(),
                         status = core::share_this_status()] {
    core::set_error_context(context);
    const core::PublicCallScope here(call);
    const core::ServingThread serving(status, served_);
    try {
      attend();
    } catch (...) {
      error_ = std::current_exception();
    }
  });
}

Attendance::~Attendance() {
  if (!thread_.joinable()) return;
  set(State::kGivesUp);
  thread_.join();
}

void Attendance::finish() {
  if (!thread_.joinable()) return;
  std::optional<core::ServedBy> served;
  if (served_ == this) served.emplace(this);
  set(State::kIsDone);
  thread_.join();
  if (error_) std::rethrow_exception(error_);
}

void Attendance::set(State state) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_ = state;
  }
  changed_.notify_one();
}

void Attendance::attend() {
  core::WaitWatch watch;
  for (;;) {
    State state = State::kWorks;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, period_, [this] { return state_ != State::kWorks; });
      state = state_;
    }
    if (state == State::kGivesUp) return;
    const std::vector<int> at_work = meet(state == State::kIsDone);
    if (at_work.empty()) return;
    if (state == State::kIsDone) watch.look("work on files", at_work);
  }
}

/// The ranks that are not done.
std::vector<int> Attendance::meet(bool is_done) {
  const at::Tensor mine = at::empty({1}, at::kLong);
  const at::Tensor all = at::empty({group_.size()}, at::kLong);
  *mine.mutable_data_ptr<int64_t>() = is_done;
  group_.all_gather(all, mine);
  std::vector<int> at_work;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (all.const_data_ptr<int64_t>()[rank] == 0) at_work.push_back(rank);
  }
  return at_work;
}

}  // namespace smp::runtime
