// SPDX-License-Identifier: Apache-2.0
#include "core/wait_watch.h"

#include <algorithm>
#include <exception>
#include <sstream>

#include "core/log.h"
#include "core/stack_request.h"
#include "core/status_reader.h"

namespace smp::core {
namespace {

using Kind = ThreadState::Kind;

// The rank that has waited longest, of those that can say so.
int speaker(const JobStatus& job) {
  const RankStatus* longest = nullptr;
  for (const RankStatus& one : job.ranks) {
    if (!one.is_waiting()) continue;
    if (longest == nullptr || one.wait_seconds > longest->wait_seconds) longest = &one;
  }
  return longest == nullptr ? -1 : longest->rank;
}

}  // namespace

WaitWatch::~WaitWatch() {
  if (is_told_ && std::uncaught_exceptions() == exceptions_) status_->clear_wait();
}

void WaitWatch::look(const char* call, const std::vector<int>& ranks) {
  if (status_ == nullptr || ranks.empty()) return;
  const auto now = Status::Clock::now();
  if (!is_told_) {
    since_ = now;
    exceptions_ = std::uncaught_exceptions();
    next_check_ = now + status_->stall();
  }
  is_told_ = status_->set_wait(since_, Label(call), ranks);
  const bool is_due = status_->stall().count() > 0 && now >= next_check_;
  if (is_told_ && is_due && !is_warned_of_) warn_of_stall();
}

// One warning is enough for all that wait meanwhile. A rank that leaves it to another looks again
// later, since that may have gone on just before.
void WaitWatch::warn_of_stall() {
  next_check_ = Status::Clock::now() + status_->stall();
  auto job = read_own_job();
  if (!job) return;
  const RankStatus* const own = job->find(status_->rank());
  if (own == nullptr) return;
  is_warned_of_ = std::any_of(job->ranks.begin(), job->ranks.end(), [&](const RankStatus& one) {
    return one.warned_seconds >= 0 && one.warned_seconds <= own->wait_seconds;
  });
  if (is_warned_of_ || speaker(*job) != own->rank) return;
  is_warned_of_ = true;
  status_->set_warned();
  ask_for_stacks(*job);
  std::ostringstream text;
  text << "rank " << own->rank << " has waited for \"stall_seconds\" ("
       << std::chrono::duration<double>(status_->stall()).count() << " s), and waits on:\n"
       << status_text(*job);
  std::string lines = text.str();
  lines.pop_back();
  log_warning(lines);
}

}  // namespace smp::core
