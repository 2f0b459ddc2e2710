// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace smp::comm {

/// The file descriptor of a socket, which is closed with this object, and in every process that
/// this one forks: a child that lives on must not keep a connection open whose rank has died.
class Socket {
 public:
  explicit Socket(int fd = -1);
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

using TimePoint = std::chrono::steady_clock::time_point;

/// A TCP socket that listens on a free port of this host's `address`, as address_of_this_host gives
/// it.
Socket listen_on_free_port(const std::string& address);

/// The port that a socket listens on.
uint16_t port_of(const Socket& listener);

/// A TCP connection to `host` (a name or an address). Throws `CommError` that gives the reason.
Socket connect_to(const std::string& host, uint16_t port, TimePoint deadline);

/// A connection that has come in; nothing when there is none. Throws `CommError` where it cannot be
/// taken, as for want of file descriptors.
std::optional<Socket> accept_from(const Socket& listener);

/// Blocks until one of the sockets can be read, or the deadline.
void await_readable(const std::vector<int>& sockets, TimePoint deadline);

/// Blocks until all bytes have moved; false when the peer is gone or the deadline has passed.
bool write_all(const Socket& socket, const void* data, size_t bytes, TimePoint deadline);

/// The address under which other ranks reach this one: of the network interface named `interface`
/// (empty for none); else the loopback, if `towards` (a host; empty if none is known) is called so;
/// else where the route to `towards` begins, else of the first interface that is not the loopback.
/// Throws `CommError` when the named interface has no address.
std::string address_of_this_host(const std::string& interface, const std::string& towards);

}  // namespace smp::comm
