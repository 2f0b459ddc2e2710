// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "comm/transport.h"

namespace smp::comm {

/// Pairs the messages that come to one rank with the receives that it posts: those of one (group,
/// source, tag) in the order sent and posted. A receive from any rank (kAnyRank) takes the message
/// that has come first, and learns its source; of the receives that could take a message, the one
/// that was posted first does. A message whose receive is not posted yet is kept in
/// memory of the matcher's own, so that a send never waits for its receive.
///
/// Every method may be called from any thread. A transfer's `done` runs without a lock held.
class MessageMatcher {
 public:
  /// Where a message belongs: the group's context, the source's rank in the group, the tag.
  using Address = std::tuple<int, int, Tag>;

 private:
  // A message that came, or is coming, before its receive was posted.
  struct Unexpected {
    std::unique_ptr<std::byte[]> data;
    size_t bytes;
    bool is_complete;
    uint64_t number = 0;       // in order of arrival
    PendingMessage receive{};  // once it is posted
  };

 public:
  /// A message that is being read.
  class Arrival {
   public:
    /// Where its bytes go.
    std::byte* data() const { return data_; }

   private:
    friend class MessageMatcher;

    std::byte* data_ = nullptr;
    PendingMessage
        receive_{};  // receive whose tensor the bytes go into; otherwise they go into the next
    std::shared_ptr<Unexpected> unexpected_;
  };

  /// `transport` is handed to the transfers' `done`.
  explicit MessageMatcher(Transport& transport) : transport_(transport) {}

  /// Posts a receive of this rank. Fails it if its source has departed and left no message for it.
  void post(PendingMessage receive);

  /// A message that is there as a whole; its bytes are copied before this returns.
  void deliver(const Address& address, const void* data, size_t bytes);

  /// A message that comes bit by bit: begin() when its length is known, then end() when all of its
  /// bytes have been written to `data()`. A length that the receive does not expect fails it then.
  Arrival begin(const Address& address, size_t bytes);
  void end(const Arrival& arrival);

  /// Rank `world_rank` sends nothing more: fails the receives from it that have no message, those
  /// posted later as well; those from any rank when all other ranks of their group have departed.
  void depart(int world_rank);

  /// The error of transfers with a rank that has departed; empty while it has not.
  std::string departure(int world_rank) const;

  /// Drops all receives and messages, present and to come, with the memory that they hold.
  void abort();

 private:
  struct Receive {
    PendingMessage transfer;
    uint64_t number;  // in the order posted
  };

  // Messages without a receive, or receives without a message: one of the two is always empty.
  // Receives from any rank have an address with kAnyRank.
  struct Queues {
    std::list<std::shared_ptr<Unexpected>> messages;
    std::list<Receive> receives;
  };
  using QueuesByAddress = std::map<Address, Queues>;

  QueuesByAddress::iterator find_message(const PendingMessage& receive);
  QueuesByAddress::iterator find_receive(const Address& address);
  std::string departure_of_sources(const PendingMessage& receive) const;
  PendingMessage take_receive(const Address& address);
  void keep(const Address& address, std::shared_ptr<Unexpected> message);
  void complete(const PendingMessage& receive, const void* data, size_t bytes);

  Transport& transport_;
  mutable std::mutex mutex_;  // guards everything below
  QueuesByAddress queues_;    // without empty entries: every collective has an address of its own
  uint64_t count_ = 0;        // number of receives and messages that had to wait
  std::map<int, std::string> departed_;
  bool aborted_ = false;
};

}  // namespace smp::comm
