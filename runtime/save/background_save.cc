// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/background_save.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/env.h"
#include "core/failure.h"
#include "core/log.h"
#include "core/public_call.h"
#include "core/status.h"
#include "runtime/together.h"

namespace smp::runtime {
namespace {

/// Each takes a file descriptor.
constexpr size_t kMostLocks = 16;

/// The text of an error after its prefix.
std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return core::text_without_prefix(known);
  } catch (const std::exception& other) {
    return other.what();
  }
}

/// An error of the ranks' talk stays one.
[[noreturn]] void fail_with(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CommError&) {
    throw;
  } catch (...) {
    core::fail<CheckpointError>("the asynchronous save before has failed: ", text_of(error));
  }
}

}  // namespace

BackgroundSave::BackgroundSave(std::function<void()> write)
    : future_(std::async(std::launch::async, [this, write = std::move(write),
                                              context = core::error_context(),
                                              call = core::this_public_call(),
                                              status = core::share_this_status()] {
                core::set_error_context(context);
                const core::ServingThread serving(status, this);
                const core::PublicCallScope here(call);
                const at::NoGradGuard no_grad;
                write();
              }).share()) {}

bool BackgroundSave::is_done() const {
  return !future_.valid() || future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void BackgroundSave::await() const {
  const core::ServedBy served(this);
  future_.wait();
}

void BackgroundSave::wait() {
  if (!future_.valid()) return;
  await();
  seen_ = true;
  future_.get();
}

std::exception_ptr BackgroundSave::unseen_error() {
  if (!future_.valid()) return nullptr;
  await();
  if (seen_.exchange(true)) return nullptr;
  try {
    future_.get();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void CheckpointContext::end() {
  if (const auto last = std::exchange(last_, nullptr)) {
    const auto error = last->unseen_error();
    if (error) core::log_error("an asynchronous save has failed: " + text_of(error));
  }
  locks_.clear();
  group_ = nullptr;
  extras.clear();
  tensors.clear();
}

bool CheckpointContext::notes_progress() const {
  const bool is_first = holders != nullptr && holders->is_first();
  return world_->rank() == 0 || (is_first && !core::env(core::kFailureDirVariable));
}

const comm::CommunicatorPtr& CheckpointContext::group() {
  if (!group_) {
    std::vector<int> all(world_->size());
    std::iota(all.begin(), all.end(), 0);
    group_ = world_->split(all, "checkpoint");
  }
  return group_;
}

void CheckpointContext::finish() {
  const auto last = std::exchange(last_, nullptr);
  if (last == nullptr) return;
  together(*world_, [&] {
    if (const auto error = last->unseen_error()) fail_with(error);
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

RemovableHandle register_extra(const std::shared_ptr<CheckpointContext>& context,
                               const std::string& call, const std::string& name,
                               CheckpointContext::Extra extra) {
  SMP_CHECK_WITH(UsageError, context->extras.count(name) == 0, call, " was called twice for \"",
                 name, "\": give each state a name of its own");
  const auto waiting = context->unclaimed.find(name);
  if (extra.check && waiting != context->unclaimed.end()) {
    extra.check(waiting->second);
    extra.load(waiting->second);
    context->unclaimed.erase(waiting);
  }
  context->extras.emplace(name, std::move(extra));
  return RemovableHandle([weak = std::weak_ptr<CheckpointContext>(context), name] {
    if (const auto alive = weak.lock()) alive->extras.erase(name);
  });
}

}  // namespace smp::runtime
