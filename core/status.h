// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/public_call.h"

namespace smp::core {

/// A short text that is written and read without a lock: "1B0", "receive 5F2". Longer ones are cut
/// off.
class Label {
 public:
  static constexpr size_t kLength = 24;
  using Words = std::array<uint64_t, kLength / sizeof(uint64_t)>;

  explicit Label(std::string_view text = "") {
    std::memcpy(words_.data(), text.data(), std::min(text.size(), kLength));
  }
  explicit Label(const Words& words) : words_(words) {}

  const Words& words() const { return words_; }
  std::string text() const {
    const auto* const data = reinterpret_cast<const char*>(words_.data());
    return {data, strnlen(data, kLength)};
  }

 private:
  Words words_{};
};

/// Memory that one rank writes and every process may read at any time (see core/status_reader.h):
/// the rank's action, and, where it waits, the ranks that it waits for. Each part is a cache line
/// with a number that is odd while the part is written, so that a reader knows that it has read
/// half of two. Times are of the steady clock, in ns.
struct StatusMemory {
  static constexpr uint64_t kMagic = 0x32737574617473'00;  // changes with the layout

  using SharedLabel = std::array<std::atomic<uint64_t>, std::tuple_size_v<Label::Words>>;

  struct alignas(64) Doing {
    std::atomic<uint32_t> version;
    std::atomic<uint32_t> step;
    std::atomic<int64_t> since;
    SharedLabel action;
  };
  struct alignas(64) Waiting {
    static constexpr size_t kRanks = 4;
    std::atomic<uint32_t> version;
    std::atomic<uint32_t> count;  // number of ranks that it waits for; 0: it does not wait
    std::atomic<int64_t> since;
    std::array<std::atomic<int32_t>, kRanks> ranks;  // the first of them, in the world
    SharedLabel call;                                // "all_reduce"
  };
  /// Where the rank's thread was when it was last asked (see core/stack_request.h).
  struct alignas(64) Stack {
    static constexpr size_t kFrames = 31;
    std::atomic<uint32_t> version;  // 0: it does not answer
    std::atomic<uint32_t> count;
    std::array<std::atomic<uint64_t>, kFrames> frames;  // addresses, innermost first
  };
  /// Written before others can read it, but for `warned`.
  struct alignas(64) Owner {
    uint64_t magic;
    int32_t rank;
    pid_t process;
    pid_t thread;
    uint32_t text_bytes;  // bytes of the job's identity, name and program and of each rank's host,
                          // a line each, behind this
    int64_t started;
    std::atomic<int64_t> warned;  // when the rank has last told of a stall; 0: never
  };

  Doing doing;
  Waiting waiting;
  Stack stack;
  Owner owner;
};

/// The fixed part of a rank's status.
struct StatusOwner {
  std::string job_id;  ///< Identity of this job alone.
  std::string job;     ///< Name that users give it; jobs may have the same one.
  int rank = 0;        ///< In the world.
  /// Hosts by rank of the world.
  std::vector<std::string> hosts;
};

/// The status that a rank writes while it works: a few stores into memory of its own, for `smprun
/// --status` and for the other ranks when they wait for it. The memory has no name in a file system
/// (memfd_create): others open it by way of /proc, and it is gone when its process is.
///
/// Written by the rank's thread; waits also by a thread that works for it (see `ServedBy`).
class Status {
 public:
  using Clock = std::chrono::steady_clock;

  /// Makes the status of the calling thread's rank. `stall` is how long a wait may last before it
  /// is warned of; 0: for ever.
  Status(const StatusOwner& owner, std::chrono::nanoseconds stall);
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;
  ~Status();

  /// The call of the user's that the rank is in, for errors: "call 3 of step function \"train\"";
  /// empty outside.
  std::string call() const;
  /// False within another call.
  bool enter_call(const std::string& call);
  void leave_call();

  /// The rank is in its `step`-th step, or has ended it.
  void set_step(int64_t step);
  /// The rank does this from now on.
  void set_action(const Label& action);
  const Label& action() const { return action_; }

  /// The rank has waited since then in `call`, for `ranks` (one at least). False if this thread's
  /// waits are not the rank's.
  bool set_wait(Clock::time_point since, const Label& call, const std::vector<int>& ranks);
  void clear_wait();
  /// Nor is it served by a thread any more.
  void end_wait();

  /// The rank's thread is at these addresses, innermost first. May be called by a signal handler.
  void set_stack(void* const* begin, void* const* end);

  const std::string& job_id() const { return job_id_; }
  int rank() const;
  std::chrono::nanoseconds stall() const { return stall_; }
  void set_warned();

 private:
  friend class ServedBy;

  bool is_served_by_this_thread() const;

  const std::string job_id_;
  const std::chrono::nanoseconds stall_;
  int fd_ = -1;
  size_t bytes_ = 0;
  StatusMemory* memory_ = nullptr;
  Label action_;
  mutable std::mutex mutex_;  // guards call_, and the writing of waits
  std::string call_;
  std::atomic<const void*> server_{nullptr};
};

/// The status of the rank that this thread is or works for: its own, else that of the process; null
/// where there is none.
Status* this_status();
std::shared_ptr<Status> share_this_status();

/// The status of the rank that is this process; null takes it back.
void set_process_status(std::shared_ptr<Status> status);
/// The status of the rank that is this thread; null takes it back.
void set_thread_status(std::shared_ptr<Status> status);

/// In a thread that works for a rank: its waits are the rank's while that is `ServedBy(server)`;
/// with null they are no rank's.
class ServingThread {
 public:
  ServingThread(std::shared_ptr<Status> status, const void* server);
  ~ServingThread();
  ServingThread(const ServingThread&) = delete;
  ServingThread& operator=(const ServingThread&) = delete;
};

/// The rank's server that this thread serves, null if none: those that it starts to help it serve
/// the same.
const void* this_server();

/// While the rank's thread sleeps until another has done its work; when that ends by an error,
/// until the next time or the rank's next call.
class ServedBy {
 public:
  explicit ServedBy(const void* server);
  ~ServedBy();
  ServedBy(const ServedBy&) = delete;
  ServedBy& operator=(const ServedBy&) = delete;

 private:
  Status* const status_;
  const int exceptions_;  // under way before
};

/// Restores at the end of the block the rank's action before it.
class ActionScope {
 public:
  ActionScope() : status_(this_status()), before_(status_ ? status_->action() : Label()) {}
  ~ActionScope() {
    if (is_set_) status_->set_action(before_);
  }
  ActionScope(const ActionScope&) = delete;
  ActionScope& operator=(const ActionScope&) = delete;

  void set(const Label& action) {
    if (status_ == nullptr) return;
    status_->set_action(action);
    is_set_ = true;
  }

 private:
  Status* const status_;
  const Label before_;
  bool is_set_ = false;
};

/// A call of the user's, until the end of the block: the status and errors of waits name it, and
/// ranks compare it where they meet. One inside another belongs to that.
class CallScope {
 public:
  /// `call` as errors have it; `action` as the status has it, the same if empty; `kind` as
  /// `PublicCall` has it, `call` if left out.
  explicit CallScope(const std::string& call, std::string_view action = "",
                     std::optional<std::string_view> kind = std::nullopt);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  Status* const status_;
  const bool is_outermost_;
  ActionScope action_;
  std::optional<PublicCallScope> compared_;  // call scope of the outermost on its thread
};

/// The name of a rank's work between calls.
constexpr const char* kUsersCode = "user's code";

}  // namespace smp::core
