// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_queue.h"

#include "comm/exit_gate.h"
#include "core/check.h"
#include "core/status.h"

namespace smp::comm {

class CollectiveQueue::QueuedWork final : public Work {
 public:
  QueuedWork(std::shared_ptr<CollectiveQueue> queue, EntryPtr entry)
      : queue_(std::move(queue)), entry_(std::move(entry)) {}

  bool test() override { return entry_->done.load(std::memory_order_acquire); }
  void wait() override { queue_->wait(entry_); }

 private:
  const std::shared_ptr<CollectiveQueue> queue_;
  const EntryPtr entry_;
};

CollectiveQueue::~CollectiveQueue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    const auto left =
        std::uncaught_exceptions() > 0 ? std::chrono::milliseconds(0) : group_->timeout();
    for (const EntryPtr& entry : entries_) {
      entry->deadline.set(left);
    }
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

WorkPtr CollectiveQueue::push(Task task) {
  auto entry = std::make_shared<Entry>();
  entry->task = std::move(task);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back(entry);
    if (!thread_.joinable()) {
      thread_ =
          std::thread([this, context = core::error_context(), status = core::share_this_status()] {
            const core::ServingThread serving(status, this);
            loop(context);
          });
    }
  }
  changed_.notify_all();
  return std::make_shared<QueuedWork>(shared_from_this(), std::move(entry));
}

bool CollectiveQueue::try_occupy() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (occupied_ || !entries_.empty()) {
    return false;
  }
  occupied_ = true;
  return true;
}

void CollectiveQueue::release() {
  std::lock_guard<std::mutex> lock(mutex_);
  occupied_ = false;
  if (!entries_.empty()) {
    changed_.notify_all();
  }
}

// Those issued before hold this one up, so the deadline is theirs too.
void CollectiveQueue::set_deadlines(const EntryPtr& last) {
  for (const EntryPtr& entry : entries_) {
    entry->deadline.set(group_->timeout());
    if (entry == last) {
      return;
    }
  }
}

void CollectiveQueue::wait(const EntryPtr& entry) {
  if (!entry->done.load(std::memory_order_acquire)) {
    const core::ServedBy served(this);
    std::unique_lock<std::mutex> lock(mutex_);
    set_deadlines(entry);
    changed_.wait(lock, [&] { return entry->done.load(std::memory_order_acquire); });
    if (entry->error) std::rethrow_exception(entry->error);
  }
  if (entry->error) std::rethrow_exception(entry->error);
}

void CollectiveQueue::loop(const std::string& context) {
  core::set_error_context(context);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !occupied_ && (stop_ || !entries_.empty()); });
    if (entries_.empty()) {
      return;
    }
    const EntryPtr entry = entries_.front();
    occupied_ = true;
    lock.unlock();
    execute(*entry);
    lock.lock();
    occupied_ = false;
    entries_.pop_front();
    entry->done.store(true, std::memory_order_release);
    changed_.notify_all();
  }
}

// The task, and with it the tensors, is gone before the work is complete.
void CollectiveQueue::execute(Entry& entry) {
  const core::PublicCallScope as_issued(entry.caller);
  try {
    entry.task(entry.deadline);
  } catch (...) {
    entry.error = std::current_exception();
  }
  let_go(std::exchange(entry.task, nullptr));
}

}  // namespace smp::comm
