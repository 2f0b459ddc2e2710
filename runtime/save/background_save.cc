// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/background_save.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/log.h"
#include "core/status.h"
#include "runtime/save/together.h"

namespace smp::runtime {
namespace {

/// Each takes a file descriptor.
constexpr size_t kMostLocks = 16;

}  // namespace

BackgroundSave::BackgroundSave(std::function<void()> write)
    : future_(std::async(std::launch::async, [write = std::move(write),
                                              context = core::error_context()] {
                core::set_error_context(context);
                const core::ServingThread nobody(nullptr, nullptr);  // the rank goes on
                const at::NoGradGuard no_grad;
                write();
              }).share()) {}

bool BackgroundSave::is_done() const {
  return !future_.valid() || future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void BackgroundSave::wait() {
  if (!future_.valid()) return;
  future_.wait();
  seen_ = true;
  future_.get();
}

std::string BackgroundSave::unseen_error() {
  if (!future_.valid()) return "";
  future_.wait();
  if (seen_.exchange(true)) return "";
  try {
    future_.get();
  } catch (const Error& error) {
    return core::text_without_prefix(error);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

CheckpointContext::~CheckpointContext() {
  if (last_ == nullptr) return;
  const std::string error = last_->unseen_error();
  if (!error.empty()) core::log_error("an asynchronous save has failed: " + error);
}

CheckpointContext& CheckpointContext::of(Runtime& runtime) {
  if (!runtime.checkpoint_context) {
    runtime.checkpoint_context = std::make_shared<CheckpointContext>(runtime.world());
  }
  return *runtime.checkpoint_context;
}

const comm::CommunicatorPtr& CheckpointContext::group(std::chrono::milliseconds longest) {
  if (!group_) {
    std::vector<int> all(world_->size());
    std::iota(all.begin(), all.end(), 0);
    group_ = world_->split(all, "checkpoint");
  }
  group_->set_timeout(longest);
  return group_;
}

void CheckpointContext::finish() {
  const auto last = std::exchange(last_, nullptr);
  if (last == nullptr) return;
  together(*world_, [&] {
    const std::string error = last->unseen_error();
    SMP_CHECK_WITH(CheckpointError, error.empty(), "the asynchronous save before has failed: ",
                   error);
    return "";
  });
}

std::shared_ptr<checkpoint::SaveLock> CheckpointContext::lock(const std::string& file) {
  auto found = std::find_if(locks_.begin(), locks_.end(),
                            [&](const auto& entry) { return entry.first == file; });
  auto lock = found == locks_.end() ? std::make_shared<checkpoint::SaveLock>(file) : found->second;
  if (found != locks_.end()) locks_.erase(found);
  locks_.emplace_back(file, lock);
  if (locks_.size() > kMostLocks) locks_.pop_front();
  return lock;
}

std::shared_ptr<BackgroundSave> CheckpointContext::start(std::function<void()> write) {
  SMP_INTERNAL_ASSERT(last_ == nullptr, "two saves at once");
  last_ = std::make_shared<BackgroundSave>(std::move(write));
  return last_;
}

RemovableHandle register_extra(const std::shared_ptr<Runtime>& runtime, const std::string& call,
                               const std::string& name, CheckpointContext::Extra extra) {
  auto& context = CheckpointContext::of(*runtime);
  SMP_CHECK_WITH(UsageError, context.extras.count(name) == 0, call, " was called twice for \"", name,
                 "\": give each state a name of its own");
  const auto waiting = context.unclaimed.find(name);
  if (extra.check && waiting != context.unclaimed.end()) {
    extra.check(waiting->second);
    extra.load(waiting->second);
    context.unclaimed.erase(waiting);
  }
  context.extras.emplace(name, std::move(extra));
  return RemovableHandle([weak = std::weak_ptr<Runtime>(runtime), name] {
    if (const auto runtime = weak.lock()) CheckpointContext::of(*runtime).extras.erase(name);
  });
}

}  // namespace smp::runtime
