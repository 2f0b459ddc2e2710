// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/call.h"
#include "comm/communicator.h"

namespace smp::comm {

/// A part of an operation: some bytes to or from one rank of the group.
struct Message {
  enum class Direction { kSend, kReceive };
  Direction direction;
  int peer;    ///< kAnyRank until a receive from any rank has its message.
  void* data;  ///< Only read when sent.
  size_t bytes;
};

/// Messages that may move at the same time. When all have moved, `finish` (may be empty) runs on
/// whichever thread saw the last one; then the next round starts.
struct Round {
  std::vector<Message> messages;
  std::function<void()> finish;
  /// Called when the message of this number has moved, if set: returns its error, which fails the
  /// operation, or nothing.
  std::function<std::string(size_t message)> check = nullptr;
};

/// A collective as a list of rounds, the same algorithm over every transport. The rounds refer to
/// the memory of the tensors of `call`, which is checked (see check_collective); their runner keeps
/// the tensors alive. A rank's own part is copied here, at once.
///
/// - all_reduce, reduce and reduce_scatter: every rank owns a slice, gets all ranks' values of it
///   and reduces them in ascending rank order; then it gives the result to whom it belongs. For an
///   all_reduce each rank sends and receives about twice the tensor, whatever the number of ranks.
/// - broadcast: a binomial tree of ceil(log2(size)) steps from the root to the last rank.
/// - all_gather, all_to_all, gather, scatter: every rank sends its part to whom it belongs.
/// - barrier: dissemination; in round k, rank r sends to r + 2^k and receives from r - 2^k.
std::vector<Round> rounds_of(const Collective& call, int rank, int size);

/// Ranks tell each other their calls.
class CallExchange {
 public:
  /// `world_ranks`: by rank of the group.
  CallExchange(const Call& own, int rank, const std::vector<int>& world_ranks);

  /// Messages of a round to and from the ranks given. Its check says whose call does not match.
  Round round(const std::vector<int>& to, const std::vector<int>& from) const;

  /// `rounds` whose first begins with such messages, to and from all ranks that they have messages
  /// to and from. Those that follow need no other's leave, so this costs bytes and no time.
  std::vector<Round> before(std::vector<Round> rounds) const;

 private:
  struct Memory;

  const std::shared_ptr<Memory> memory_;  // the messages, which outlive this
};

}  // namespace smp::comm
