// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "smp/work.h"

namespace smp::comm {

class Completer;

/// The common state of works of one backend.
struct WorkContext {
  std::string backend;  ///< "smddp"
  std::string group;
  int rank;
  std::shared_ptr<Completer> completer;
};

/// A c10d operation, for its texts and for profilers.
struct WorkCall {
  c10d::OpType type;
  const char* verb;  ///< "all_reduce": torch.profiler shows "smddp:all_reduce".
  int source = -1;   ///< Source of a message that is received from one rank.
};

/// Some communications that make one c10d operation, and the work after them. A thread that waits
/// for it, asks whether it is complete, or has its future completes it. A work that is complete
/// holds no tensors but its results.
class GroupWork final : public c10d::Work {
 public:
  /// `after` runs once, when all of `works` are complete; `inputs` are for profilers.
  GroupWork(std::shared_ptr<const WorkContext> context, const WorkCall& call,
            std::vector<WorkPtr> works, std::function<void()> after,
            const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> results);

  bool isCompleted() override;

  /// `timeout` bounds this wait alone; without one, each communication has that of the group.
  /// Throws a `TimeoutError`; the operation goes on and may be waited for again.
  bool wait(std::chrono::milliseconds timeout) override;

  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return results_; }

  /// Completes in the background. Messages have none.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Waits and completes. Never throws.
  void settle();

  /// Completes the future, which runs its callbacks. After settle().
  void deliver();

 private:
  void await(std::chrono::milliseconds timeout);
  std::exception_ptr finish_communication();

  const std::shared_ptr<const WorkContext> context_;
  const WorkCall call_;
  const std::vector<WorkPtr> works_;
  const std::vector<at::Tensor> results_;
  // In which the caller works on results of a device; those are written in it.
  const std::optional<c10::Stream> stream_;

  std::mutex settle_mutex_;  // guards the next two
  std::function<void()> after_;
  bool settled_ = false;

  std::mutex future_mutex_;  // guards the next
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Completes works whose futures are asked for, in the order in which they are given. While a
/// callback runs another thread goes on, so that it may wait for the future of a later work.
///
/// Callbacks run inside the ExitGate.
class Completer : public std::enable_shared_from_this<Completer> {
 public:
  using WorkPtr = c10::intrusive_ptr<GroupWork>;

  void push(WorkPtr work);

  /// Returns when all works are complete and their callbacks have run, but for a callback that
  /// calls this. Later works complete in push(), as they do once the gate is closed.
  void stop();

 private:
  void loop();
  void start_thread_if_none_is_idle();
  static void deliver(WorkPtr work);

  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::deque<WorkPtr> works_;
  bool one_waits_ = false;  // a thread, for the communications of the work that was the first
  int idle_ = 0;            // threads that wait for a work
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace smp::comm
