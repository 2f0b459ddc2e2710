// SPDX-License-Identifier: Apache-2.0
#include "comm/store/socket_transport.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "comm/store/ask_store.h"
#include "core/check.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;

// How long a rank that ends waits until the kernel has its last messages.
constexpr milliseconds kAbortFlush{100};
constexpr milliseconds kFarewellFlush{1000};

// Reads of one connection before the next one has its turn.
constexpr int kReadsPerTurn = 16;

// The text of an abort is cut to it, so that a text that claims to be longer is none.
constexpr size_t kLongestText = 1 << 20;

// Whether the peer's kernel has all that was written, or never will. A connection that is closed
// with bytes to read is reset, and forgets the unsent ones.
bool is_taken(const Socket& socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  int bytes = 0;
  return getsockopt(socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
         info.tcpi_state == TCP_CLOSE || ioctl(socket.fd(), SIOCOUTQ, &bytes) != 0 || bytes == 0;
}

}  // namespace

SocketTransport::SocketTransport(int world_rank, Meeting meeting)
    : world_rank_(world_rank),
      store_(meeting.store),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  SMP_INTERNAL_ASSERT(epoll_ && stop_, "epoll: ", std::strerror(errno));
  cpu_set_t cores;
  CPU_ZERO(&cores);
  int local_size = 0;
  for (const RankRecord& record : meeting.ranks) {
    shares_memory_.push_back(record.host == meeting.ranks[world_rank].host);
    if (shares_memory_.back()) {
      CPU_OR(&cores, &cores, &record.cores);
      ++local_size;
    }
  }
  has_core_for_each_rank_ = local_size <= CPU_COUNT(&cores);

  watch(stop_, nullptr);
  for (size_t rank = 0; rank < meeting.connections.size(); ++rank) {
    connections_.push_back(nullptr);
    if (static_cast<int>(rank) == world_rank) {
      continue;
    }
    connections_.back() = std::make_unique<Connection>();
    Connection& connection = *connections_.back();
    connection.rank = static_cast<int>(rank);
    connection.socket = std::move(meeting.connections[rank]);
    watch(connection.socket, &connection);
  }
  thread_ = std::thread([this] { loop(); });
}

SocketTransport::~SocketTransport() { close(); }

void SocketTransport::watch(const Socket& socket, Connection* connection) {
  epoll_event event{EPOLLIN, {connection}};
  SMP_INTERNAL_ASSERT(epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, socket.fd(), &event) == 0,
                      "epoll: ", std::strerror(errno));
}

void SocketTransport::close() {
  if (!thread_.joinable()) {
    return;
  }
  if (getpid() != process_) {
    thread_.detach();  // there is none here, and the connections are the parent's
    return;
  }
  if (!aborted()) {
    tell_all(Header::kFarewell, "", kFarewellFlush);
  }
  const uint64_t one = 1;
  SMP_INTERNAL_ASSERT(::write(stop_.fd(), &one, sizeof one) == sizeof one, std::strerror(errno));
  thread_.join();
  for (const auto& connection : connections_) {
    if (connection) {
      connection->socket = Socket();
    }
  }
}

void SocketTransport::start(PendingMessage transfer) {
  if (aborted()) {
    return;  // every wait throws; peers may no longer answer
  }
  if (transfer.message.direction == Message::Direction::kSend) {
    send(std::move(transfer));
  } else {
    matcher_.post(std::move(transfer));
  }
}

void SocketTransport::send(PendingMessage transfer) {
  const Message& message = transfer.message;
  const GroupState& group = transfer.group();
  const int peer = group.world_ranks[message.peer];
  if (peer == world_rank_) {
    matcher_.deliver({group.context, group.rank, transfer.tag}, message.data, message.bytes);
    transfer.done(*this);
    return;
  }
  if (const std::string departure = matcher_.departure(peer); !departure.empty()) {
    transfer.done(*this, departure);
    return;
  }
  Outgoing outgoing;
  outgoing.header = {Header::kMessage, group.context, transfer.tag, group.rank, message.bytes};
  outgoing.data = static_cast<const std::byte*>(message.data);
  outgoing.transfer = std::move(transfer);
  enqueue(*connections_[peer], std::move(outgoing));
}

// The thread that finds the queue empty writes; otherwise the progress thread comes to it.
void SocketTransport::enqueue(Connection& connection, Outgoing outgoing) {
  std::unique_lock<std::mutex> lock(connection.mutex);
  connection.queue.push_back(std::move(outgoing));
  if (connection.queue.size() == 1) {
    write(connection, std::move(lock));
  }
}

// Under the connection's lock, which is gone when transfers are told of their end.
void SocketTransport::write(Connection& connection, std::unique_lock<std::mutex> lock) {
  const std::vector<PendingMessage> written = write_queue(connection);
  lock.unlock();
  for (const PendingMessage& transfer : written) {
    transfer.done(*this);
  }
}

// Writes as much as the kernel takes; returns the transfers that have gone. A connection that has
// ended is left to the thread, which reads the end.
std::vector<PendingMessage> SocketTransport::write_queue(Connection& connection) {
  std::vector<PendingMessage> written;
  while (!connection.queue.empty()) {
    Outgoing& out = connection.queue.front();
    const size_t head = std::min(out.sent, sizeof out.header);
    const size_t body = out.sent - head;
    const auto* data =
        out.text.empty() ? out.data : reinterpret_cast<const std::byte*>(out.text.data());
    iovec parts[] = {{reinterpret_cast<std::byte*>(&out.header) + head, sizeof out.header - head},
                     {const_cast<std::byte*>(data) + body, out.header.bytes - body}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t count = sendmsg(connection.socket.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      break;
    }
    out.sent += count;
    if (out.sent == sizeof out.header + out.header.bytes) {
      if (out.transfer.operation) {
        written.push_back(std::move(out.transfer));
      }
      connection.queue.pop_front();
    }
  }
  watch_room(connection, !connection.queue.empty());
  return written;
}

void SocketTransport::watch_room(Connection& connection, bool room) {
  if (connection.watches_room != room) {
    connection.watches_room = room;
    epoll_event event{room ? EPOLLIN | EPOLLOUT : uint32_t{EPOLLIN}, {&connection}};
    epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, connection.socket.fd(), &event);
  }
}

void SocketTransport::loop() {
  std::array<epoll_event, 64> events;
  for (;;) {
    const int count = epoll_wait(epoll_.fd(), events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.ptr == nullptr) {
        return;
      }
      Connection& connection = *static_cast<Connection*>(events[i].data.ptr);
      try {
        serve(connection, events[i].events);
      } catch (const std::bad_alloc&) {
        give_up(connection, c10::str("there is no memory for a message of ",
                                     connection.incoming.header.bytes, " bytes"));
      } catch (const Error& error) {
        give_up(connection, core::text_without_prefix(error));
      } catch (const std::exception& error) {
        give_up(connection, error.what());
      }
    }
  }
}

void SocketTransport::serve(Connection& connection, uint32_t events) {
  if (events & EPOLLOUT) {
    write(connection, std::unique_lock<std::mutex>(connection.mutex));
  }
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
    read(connection);
  }
}

void SocketTransport::read(Connection& connection) {
  for (int turn = 0; turn < kReadsPerTurn; ++turn) {
    Incoming& in = connection.incoming;
    constexpr size_t kHeader = sizeof in.header;
    std::byte* to = in.read < kHeader ? reinterpret_cast<std::byte*>(&in.header) + in.read
                                      : in.data() + (in.read - kHeader);
    const size_t end = in.read < kHeader ? kHeader : kHeader + in.header.bytes;
    const ssize_t count = recv(connection.socket.fd(), to, end - in.read, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0 && errno == EAGAIN) {
      return;
    }
    if (count <= 0) {
      lose(connection);
      return;
    }
    in.read += count;
    if (in.read == kHeader) {
      begin_message(connection);
    }
    if (in.read >= kHeader && in.read == kHeader + in.header.bytes) {
      end_message(connection);
    }
  }
}

void SocketTransport::begin_message(Connection& connection) {
  Incoming& in = connection.incoming;
  const Header& header = in.header;
  if (header.kind == Header::kMessage) {
    in.message = matcher_.begin({header.context, header.source, header.tag}, header.bytes);
    return;
  }
  const bool is_text = header.kind == Header::kAbort || header.kind == Header::kFarewell;
  SMP_CHECK_WITH(CommError, is_text && header.bytes <= kLongestText, "what begins there (kind ",
                 static_cast<int>(header.kind), ", ", header.bytes,
                 " bytes) is no message. Check that all ranks run the same version of the library");
  in.text.resize(header.bytes);
}

void SocketTransport::end_message(Connection& connection) {
  const Incoming in = std::exchange(connection.incoming, Incoming());
  switch (in.header.kind) {
    case Header::kMessage:
      return matcher_.end(in.message);
    case Header::kAbort:
      return spread_abort(in.text, milliseconds(0));
    case Header::kFarewell:
      connection.got_farewell = true;
  }
}

void SocketTransport::lose(Connection& connection) {
  epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, connection.socket.fd(), nullptr);
  if (connection.got_farewell) {
    matcher_.depart(connection.rank);
  } else {
    const std::string message =
        c10::str("rank ", connection.rank, " failed: its connection to rank ", world_rank_,
                 " was closed: the process was ended, or its host cannot be reached");
    spread_abort(message, milliseconds(0));
  }
}

// Gives up a connection whose further bytes cannot be read.
void SocketTransport::give_up(Connection& connection, const std::string& reason) {
  epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, connection.socket.fd(), nullptr);
  spread_abort(c10::str("rank ", world_rank_, " failed: it cannot go on reading from rank ",
                        connection.rank, ": ", reason),
               milliseconds(0));
}

void SocketTransport::abort(int world_rank, const std::string& reason) noexcept {
  spread_abort(c10::str("rank ", world_rank, " failed: ", reason), kAbortFlush);
}

// The others are told before this rank does anything else: they may learn that it has ended before
// they learn why.
void SocketTransport::spread_abort(const std::string& text, milliseconds patience) {
  if (set_abort_text(text)) {
    tell_all(Header::kAbort, text.substr(0, kLongestText), patience);
    matcher_.abort();
    notify();
  }
}

// Returns when the others' kernels have it all, or after `patience`.
void SocketTransport::tell_all(Header::Kind kind, const std::string& text, milliseconds patience) {
  for (const auto& connection : connections_) {
    if (connection) {
      Outgoing outgoing;
      outgoing.header.kind = kind;
      outgoing.header.bytes = text.size();
      outgoing.text = text;
      enqueue(*connection, std::move(outgoing));
    }
  }
  const Clock::time_point deadline = Clock::now() + patience;
  for (const auto& connection : connections_) {
    const auto written = [&] {
      std::lock_guard<std::mutex> lock(connection->mutex);
      return connection->queue.empty() && is_taken(connection->socket);
    };
    while (connection && !written() && Clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
}

// The group's first member draws a number and leaves it for the others under the split's name.
int SocketTransport::make_context(const GroupState& parent, int first_member) {
  int split = 0;
  {
    std::lock_guard<std::mutex> lock(splits_mutex_);
    split = splits_[parent.context]++;
  }
  const std::string key = c10::str("group/", parent.context, "/", split, "/", first_member);
  const milliseconds timeout = parent.timeout();
  const bool is_first = parent.rank == first_member;
  return ask_store(store_, Clock::now() + timeout, c10::str("split of group '", parent.name, "'"),
                   [key, timeout, is_first](const auto& store) {
                     if (!is_first) {
                       store->wait({key}, timeout);
                       return std::stoi(store->get_to_str(key));
                     }
                     const int context = static_cast<int>(store->add("groups", 1));
                     const std::string text = std::to_string(context);
                     store->set(key, std::vector<uint8_t>(text.begin(), text.end()));
                     return context;
                   });
}

bool SocketTransport::shares_memory(int, int other) const { return shares_memory_[other]; }

}  // namespace smp::comm
