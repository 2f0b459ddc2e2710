// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "comm/deadline.h"
#include "comm/transport.h"
#include "core/public_call.h"
#include "smp/work.h"

namespace smp::comm {

/// Runs the collectives of one communicator one after the other, in the order in which they were
/// issued. One that is waited for at once runs on the caller's thread, if nothing is outstanding;
/// the others run on a thread of the queue, which starts with the first of them, and go on while
/// their rank computes.
class CollectiveQueue : public std::enable_shared_from_this<CollectiveQueue> {
 public:
  using Task = std::function<void(const Deadline&)>;

  explicit CollectiveQueue(std::shared_ptr<const GroupState> group) : group_(std::move(group)) {}

  /// Returns when everything issued has run, since peers need it; at once, giving it up, while an
  /// exception is thrown.
  ~CollectiveQueue();

  /// Runs the task now, or queues it and waits. Throws its errors.
  template <class F>
  void run(F&& task) {
    if (!try_occupy()) {
      push(std::forward<F>(task))->wait();
      return;
    }
    const Release release{*this};
    task(Deadline(group_->timeout()));
  }

  /// Queues the task; the work throws its errors.
  WorkPtr push(Task task);

 private:
  struct Entry {
    Task task;
    core::PublicCall caller = core::this_public_call();  // when it was issued
    Deadline deadline;
    std::exception_ptr error;  // written before done
    std::atomic<bool> done{false};
  };
  using EntryPtr = std::shared_ptr<Entry>;

  struct Release {
    CollectiveQueue& queue;
    ~Release() { queue.release(); }
  };

  class QueuedWork;

  bool try_occupy();
  void release();
  void wait(const EntryPtr& entry);
  void set_deadlines(const EntryPtr& last);
  void loop(const std::string& context);
  static void execute(Entry& entry);

  const std::shared_ptr<const GroupState> group_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<EntryPtr> entries_;  // the first one may be running
  bool occupied_ = false;         // a task runs
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace smp::comm
