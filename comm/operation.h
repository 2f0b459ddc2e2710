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

/// What an operation is, for its messages and its texts.
struct OperationInfo {
  const char* verb;  ///< "isend", "all_reduce" ...
  size_t bytes;
  int peer;  ///< -1 for a collective; may be kAnyRank.
  Tag tag;
};

/// "irecv of 8 bytes from rank 1 with tag 7 on group 'world' (here rank 0 of 2)".
std::string describe(const GroupState& group, const OperationInfo& info);

/// What a wait that ran out of time says after `waited`; `waits_for` as in "rank 1".
std::string describe_timeout(const GroupState& group, const OperationInfo& info,
                             std::chrono::milliseconds waited, const std::string& waits_for);

/// Runs the rounds of one communication. Whoever ends the last transfer of a round (the caller,
/// a peer's thread, the progress thread) starts the next, so an operation goes on while its own
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

  /// Why it failed; empty when it did not. Valid once done().
  const std::string& error() const { return error_; }

  /// The rank whose message a receive from any rank took. Valid once done().
  int source() const { return source_; }

  std::string describe() const { return comm::describe(*group_, info_); }

  std::string describe_timeout(std::chrono::milliseconds waited) const {
    return comm::describe_timeout(*group_, info_, waited, open_peers());
  }

  const GroupState& group() const { return *group_; }

 private:
  void run(Transport& transport);
  bool close_one(std::optional<size_t> index = std::nullopt);
  void end_round();
  void finish(Transport& transport, std::string error);
  std::string open_peers() const;

  const std::shared_ptr<const GroupState> group_;
  const OperationInfo info_;
  const std::vector<Round> rounds_;
  std::vector<at::Tensor> tensors_;  // until it is complete

  mutable std::mutex mutex_;  // guards the next three
  size_t round_ = 0;
  size_t open_ = 0;            // transfers of the round not yet ended; one more while it starts
  std::vector<bool> is_open_;  // by transfer of the round

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
