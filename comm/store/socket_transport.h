// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/message_matcher.h"
#include "comm/store/rendezvous.h"
#include "comm/store/socket.h"
#include "comm/transport.h"

namespace smp::comm {

/// Messages over TCP connections, one to each other rank.
///
/// Their movers: the thread that starts a send writes the bytes that the kernel takes at once; one
/// thread per transport, asleep until the kernel wakes it, writes the rest and reads all that
/// arrives (see MessageMatcher), so that a send never waits for its receive.
///
/// How failures spread: a rank that aborts, or learns of an abort, tells all others before it does
/// anything else. A connection that ends without a farewell means that its rank has died, which
/// aborts the world; one that ends after a farewell fails the receives from that rank only.
class SocketTransport final : public Transport {
 public:
  /// The meeting's store gives groups their numbers, and must live as long as its ranks make
  /// groups.
  SocketTransport(int world_rank, Meeting meeting);
  ~SocketTransport() override;

  void start(PendingMessage transfer) override;
  int make_context(const GroupState& parent, int first_member) override;
  bool shares_memory(int this_rank, int other) const override;
  bool has_core_for_each_rank() const override { return has_core_for_each_rank_; }
  void abort(int world_rank, const std::string& reason) noexcept override;

  /// Bids the others farewell and ends the connections; safe to call twice. No operation may be
  /// under way that needs another rank. Does nothing in a process that this one has forked.
  void close();

 private:
  // The header of each message.
  struct Header {
    enum Kind : int32_t { kMessage, kAbort, kFarewell };
    Kind kind = kMessage;
    int32_t context = 0;
    Tag tag = 0;
    int32_t source = 0;  // rank in the group
    uint64_t bytes = 0;
  };

  // A message that is being sent; `text` is that of an abort.
  struct Outgoing {
    Header header;
    const std::byte* data = nullptr;
    size_t sent = 0;  // bytes of header and data
    PendingMessage transfer{};
    std::string text{};
  };

  // The message being read, or the text of an abort.
  struct Incoming {
    Header header;
    size_t read = 0;  // bytes of header and data
    MessageMatcher::Arrival message;
    std::string text;

    std::byte* data() {
      return header.kind == Header::kMessage ? message.data()
                                             : reinterpret_cast<std::byte*>(text.data());
    }
  };

  struct Connection {
    int rank;
    Socket socket;
    std::mutex mutex;  // guards the next two
    std::deque<Outgoing> queue;
    bool watches_room = false;
    Incoming incoming;  // used by the thread only
    bool got_farewell = false;
  };

  void send(PendingMessage transfer);
  void enqueue(Connection& connection, Outgoing outgoing);
  void write(Connection& connection, std::unique_lock<std::mutex> lock);
  std::vector<PendingMessage> write_queue(Connection& connection);
  void watch(const Socket& socket, Connection* connection);
  void watch_room(Connection& connection, bool room);

  void loop();
  void serve(Connection& connection, uint32_t events);
  void read(Connection& connection);
  void begin_message(Connection& connection);
  void end_message(Connection& connection);

  void lose(Connection& connection);
  void give_up(Connection& connection, const std::string& reason);
  void spread_abort(const std::string& text, std::chrono::milliseconds patience);
  void tell_all(Header::Kind kind, const std::string& text, std::chrono::milliseconds patience);

  const pid_t process_ = getpid();
  const int world_rank_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::vector<bool> shares_memory_;
  bool has_core_for_each_rank_;

  std::vector<std::unique_ptr<Connection>> connections_;  // connections by rank; null for this one
  Socket epoll_;
  Socket stop_;  // an event
  std::thread thread_;
  MessageMatcher matcher_{*this};

  std::mutex splits_mutex_;    // guards the next
  std::map<int, int> splits_;  // number of splits of a context so far
};

}  // namespace smp::comm
