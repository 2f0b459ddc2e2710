// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/deadline.h"
#include "comm/rounds.h"
#include "comm/transport.h"
#include "smp/work.h"

namespace smp::comm {

/// The operation's name and size, for its messages and its texts.
struct OperationInfo {
  const char* verb;  ///< "isend", "all_reduce" ...
  size_t bytes;
  int peer;  ///< -1 for a collective; may be kAnyRank.
  Tag tag;
};

/// "irecv of 8 bytes from rank 1 with tag 7 on group 'world' (here rank 0)", and in which call of
/// the user's. This text and those below speak of ranks of the world.
std::string describe(const GroupState& group, const OperationInfo& info);

/// The ranks of the world whose part is missing, for those of the group; kAnyRank is each of the
/// others.
std::vector<int> missing_in_world(const GroupState& group, const std::vector<int>& missing);

/// How waits end in vain. `missing` are the ranks of the group whose part is missing, or kAnyRank.
/// Throws a `CommError` if some rank has aborted.
void check_abort(const Transport& transport, const GroupState& group, const OperationInfo& info,
                 const std::vector<int>& missing = {});
/// Throws the `TimeoutError` of a wait that ran out of the group's time.
[[noreturn]] void fail_timeout(const GroupState& group, const OperationInfo& info,
                               const std::vector<int>& missing);
/// Throws the `CommError` of a wait for a process that is no more.
[[noreturn]] void fail_ended(const GroupState& group, const OperationInfo& info, int rank);

/// Runs the rounds of one communication. The thread that ends the last transfer of a round (the
/// caller's, a peer's, the progress thread) starts the next, so an operation goes on while its own
/// rank computes. It is owned by the user's Work and by its open transfers.
class Operation : public std::enable_shared_from_this<Operation> {
 public:
  /// `tensors` are kept alive until the operation is complete.
  Operation(std::shared_ptr<const GroupState> group, OperationInfo info, std::vector<Round> rounds,
            std::vector<at::Tensor> tensors);
  ~Operation();

  /// Called once, by the rank that makes the operation.
  void start(Transport& transport);

  /// `peer` is the rank that the transfer was with.
  void transfer_done(Transport& transport, size_t index, int peer, const std::string& error);

  bool done() const { return done_.load(std::memory_order_acquire); }

  /// The failure, to follow the text of describe(); empty if there was none. Valid once done().
  const std::string& error() const { return error_; }

  /// The rank whose message a receive from any rank took. Valid once done().
  int source() const { return source_; }

  const OperationInfo& info() const { return info_; }
  const GroupState& group() const { return *group_; }

  /// The ranks of the group that the round under way still has messages from or to.
  std::vector<int> open_peers() const;

 private:
  void run(Transport& transport);
  bool close_one(std::optional<size_t> index = std::nullopt);
  void end_round();
  void finish(Transport& transport, std::string error);

  const std::shared_ptr<const GroupState> group_;
  const OperationInfo info_;
  const std::vector<Round> rounds_;
  std::vector<at::Tensor> tensors_;  // until it is complete

  mutable std::mutex mutex_;  // guards the next three
  size_t round_ = 0;
  size_t open_ = 0;            // transfers of the round not yet ended; one more while it starts
  std::vector<bool> is_open_;  // state of each transfer of the round

  std::string error_;  // written before done_, as is the next
  int source_ = kAnyRank;
  std::atomic<bool> done_{false};
};

/// Waits, making progress, until the operation is complete; throws as `Work::wait` does.
void wait_for(Transport& transport, const Operation& operation, const Deadline& deadline);

/// The handle that the user gets.
ReceiveWorkPtr make_work(std::shared_ptr<Transport> transport,
                         std::shared_ptr<Operation> operation);

}  // namespace smp::comm
