// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/rounds.h"

namespace smp::comm {

class HandOverQueues;
class Operation;
class Transport;

/// The ranks that talk to each other, as this one sees them.
struct GroupState {
  std::string name;
  int rank;
  int size;
  int world_rank;                ///< This process's (or rank thread's) rank in the whole job.
  std::vector<int> world_ranks;  ///< World ranks of all members, by rank in the group.
  int context;                   ///< The transport's number for the group; messages stay inside it.
  std::atomic<int64_t> timeout_ms{300'000};
  std::atomic<bool> check_collectives{false};  ///< See Communicator::check_collectives.
  DeviceTransport device_transport;            ///< See Communicator::set_device_transport.
  std::shared_ptr<WorldEnd> world_end = std::make_shared<WorldEnd>();

  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_ms.load()); }

  /// The world's ranks of members that are given by their ranks in the group.
  std::vector<int> in_world(const std::vector<int>& ranks) const;
};

/// The group of all `size` ranks of a job, as `rank` sees it.
std::shared_ptr<GroupState> world_group(int rank, int size);

/// One message of an operation under way. Holds the operation, and so its memory, alive.
struct PendingMessage {
  Message message;
  Tag tag;
  std::shared_ptr<Operation> operation;
  size_t index;  ///< Which of its round's messages this is.

  const GroupState& group() const;

  /// The error when a message of `got` bytes comes for this receive.
  std::string length_mismatch(size_t got) const;

  /// Called by the transport, exactly once and without a lock held, when the message has moved or
  /// (with a text) cannot. May start further transfers.
  void done(Transport& transport, const std::string& error = "") const;
};

/// Moves messages between the ranks of one job. A back end implements this and nothing else;
/// collectives, checks, time-outs and texts are the same for all (see TransportCommunicator).
/// Messages of one (context, source, destination, tag) are matched in the order sent and posted.
/// Every method may be called from any thread.
class Transport {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Transport() = default;

  /// Starts a transfer. May call its `done` before it returns.
  virtual void start(PendingMessage transfer) = 0;

  /// Makes the progress that is possible without blocking: none where other threads make it.
  virtual void poll() {}

  /// Blocks, making progress, until `ready()` or the deadline; returns the last `ready()`.
  virtual bool wait_until(Clock::time_point deadline, const std::function<bool()>& ready) {
    std::unique_lock<std::mutex> lock(wait_mutex_);
    return changed_.wait_until(lock, deadline, ready);
  }

  /// Called after an operation has ended: wakes those that wait for it.
  virtual void notify() {
    // Takes the lock, so that no wait can be between its look at `ready` and its sleep.
    const std::lock_guard<std::mutex> lock(wait_mutex_);
    changed_.notify_all();
  }

  /// The context of a new group. Collective over the parent; all of its ranks have arrived.
  /// `first_member` (a rank of the parent) names the group among those of one split.
  virtual int make_context(const GroupState& parent, int first_member) = 0;

  /// Whether two ranks of the world, of which the first is this one, can map the same memory: ranks
  /// of one host.
  virtual bool shares_memory(int this_rank, int other) const = 0;

  /// Whether each rank of this host has a core for itself, so that a waiting rank may look again
  /// for a moment before it sleeps and takes no core from another.
  virtual bool has_core_for_each_rank() const = 0;

  /// See Communicator::abort.
  virtual void abort(int world_rank, const std::string& reason) noexcept = 0;

  /// Where two ranks of the world, of which the first is this one, hand each other tensors of
  /// devices: threads of one process. Null for others.
  virtual HandOverQueues* queues_between(int /*this_rank*/, int /*other*/) { return nullptr; }

  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  /// "rank 1 failed: <reason>", empty while none has.
  std::string abort_text() const {
    std::lock_guard<std::mutex> lock(abort_mutex_);
    return abort_text_;
  }

 protected:
  /// False when another thread has aborted before; then nothing changes.
  bool set_abort_text(std::string text) {
    std::lock_guard<std::mutex> lock(abort_mutex_);
    if (aborted()) {
      return false;
    }
    abort_text_ = std::move(text);
    aborted_.store(true, std::memory_order_release);
    return true;
  }

 private:
  mutable std::mutex abort_mutex_;
  std::string abort_text_;
  std::atomic<bool> aborted_{false};
  std::mutex wait_mutex_;
  std::condition_variable changed_;
};

}  // namespace smp::comm
