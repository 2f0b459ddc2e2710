// SPDX-License-Identifier: Apache-2.0
#include "comm/store/socket.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>

#include "core/check.h"

namespace smp::comm {
namespace {

using Clock = std::chrono::steady_clock;

// A peer whose host has vanished is noticed after a minute of silence.
constexpr int kSecondsOfSilence = 30;
constexpr int kSecondsBetweenProbes = 10;
constexpr int kProbes = 3;

constexpr const char* kRaiseLimit =
    ". Raise the limit of open files (ulimit -n), or end what uses them up.";

// Whether the last call of a socket failed for want of resources.
bool resources_lack() {
  return errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
}

// Those of all `Socket`s. Never destroyed: others may be closed later.
class OpenSockets {
 public:
  static OpenSockets& get() {
    static OpenSockets& all = *new OpenSockets();
    return all;
  }

  void add(int fd) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.insert(fd);
  }
  void close(int fd) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.erase(fd);
    ::close(fd);
  }

 private:
  OpenSockets() {
    SMP_INTERNAL_ASSERT(null_ >= 0, "/dev/null: ", std::strerror(errno));
    pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                   [] { get().begin_child(); });
  }

  // In a child, where other threads are no more. The numbers stay taken, since objects of this
  // process's memory close them, too.
  void begin_child() {
    for (const int fd : open_) dup2(null_, fd);
    mutex_.unlock();
  }

  const int null_ = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  std::mutex mutex_;
  std::set<int> open_;
};

struct FreeAddresses {
  void operator()(addrinfo* all) const { freeaddrinfo(all); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Null when the name is not known; `error` says why.
Addresses resolve(const std::string& host, uint16_t port, int type, std::string& error) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  error = code == 0 ? "" : gai_strerror(code);
  return Addresses(code == 0 ? found : nullptr);
}

std::string text_of(const sockaddr* address) {
  const socklen_t length =
      address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  char text[NI_MAXHOST] = "";
  getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

int milliseconds_until(TimePoint deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
}

// Waits until the socket is ready for `events`; false when the deadline has passed.
bool ready(int fd, short events, TimePoint deadline) {
  for (;;) {
    pollfd poll_fd{fd, events, 0};
    if (poll(&poll_fd, 1, milliseconds_until(deadline)) > 0) {
      return true;
    }
    if (Clock::now() >= deadline) {
      return false;
    }
  }
}

void set_option(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof value);  // where it is missing, we do without
}

void prepare_connection(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, kSecondsOfSilence);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, kSecondsBetweenProbes);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

// The connection's error, 0 when it is made.
int finish_connect(int fd, TimePoint deadline) {
  if (!ready(fd, POLLOUT, deadline)) {
    return ETIMEDOUT;
  }
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// A name that is this host's own wherever it is looked up; another may be, on one host only.
bool is_called_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0;
}

// One that others can use as it stands: a link-local one of IPv6 means nothing without its link.
bool is_usable(const sockaddr* address) {
  if (address == nullptr) {
    return false;
  }
  if (address->sa_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
    return !IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr);
  }
  return address->sa_family == AF_INET;
}

// The address of the interface of this name, or of the first that is not the loopback.
std::string address_of_interface(const std::string& name) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) {
    return "";
  }
  std::string found;
  for (const ifaddrs* one = first; one != nullptr && found.empty(); one = one->ifa_next) {
    const bool wanted = name.empty() ? (one->ifa_flags & IFF_UP) && !(one->ifa_flags & IFF_LOOPBACK)
                                     : name == one->ifa_name;
    if (wanted && is_usable(one->ifa_addr)) {
      found = text_of(one->ifa_addr);
    }
  }
  freeifaddrs(first);
  return found;
}

// Where packets to `host` start; empty when there is no route or it is the loopback.
std::string address_towards(const std::string& host) {
  std::string error;
  const Addresses addresses = resolve(host, 1, SOCK_DGRAM, error);
  if (!addresses) {
    return "";
  }
  const Socket socket(::socket(addresses->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  auto* address = reinterpret_cast<sockaddr*>(&own);
  // Nothing is sent: the kernel only looks up the route.
  if (connect(socket.fd(), addresses->ai_addr, addresses->ai_addrlen) != 0 ||
      getsockname(socket.fd(), address, &length) != 0 || is_loopback(address)) {
    return "";
  }
  return text_of(address);
}

}  // namespace

Socket::Socket(int fd) : fd_(fd) {
  if (fd_ >= 0) {
    OpenSockets::get().add(fd_);
  }
}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Socket::~Socket() {
  if (fd_ >= 0) {
    OpenSockets::get().close(fd_);
  }
}

Socket listen_on_free_port(const std::string& address) {
  std::string reason;
  const Addresses own = resolve(address, 0, SOCK_STREAM, reason);
  SMP_INTERNAL_ASSERT(own != nullptr, "the address ", address, ": ", reason);
  Socket socket(::socket(own->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  SMP_CHECK_WITH(CommError, socket || !resources_lack(),
                 "no port can be opened: ", std::strerror(errno), kRaiseLimit);
  SMP_INTERNAL_ASSERT(socket && bind(socket.fd(), own->ai_addr, own->ai_addrlen) == 0 &&
                          listen(socket.fd(), SOMAXCONN) == 0,
                      "listen on ", address, ": ", std::strerror(errno));
  return socket;
}

uint16_t port_of(const Socket& listener) {
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  SMP_INTERNAL_ASSERT(getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&own), &length) == 0,
                      std::strerror(errno));
  return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&own)->sin6_port
                                         : reinterpret_cast<sockaddr_in*>(&own)->sin_port);
}

Socket connect_to(const std::string& host, uint16_t port, TimePoint deadline) {
  std::string reason;
  const Addresses addresses = resolve(host, port, SOCK_STREAM, reason);
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    Socket socket(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int error = connect(socket.fd(), one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      error = finish_connect(socket.fd(), deadline);
    }
    if (error == 0) {
      prepare_connection(socket.fd());
      return socket;
    }
    reason = std::strerror(error);
  }
  core::fail<CommError>("no connection to ", host, " port ", port, ": ", reason,
                        ". Check that its process lives and that no firewall is between; "
                        "SMP_SOCKET_IFNAME chooses the network interface.");
}

std::optional<Socket> accept_from(const Socket& listener) {
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) {
    prepare_connection(socket.fd());
    return socket;
  }
  SMP_CHECK_WITH(CommError, !resources_lack(),
                 "a connection cannot be taken: ", std::strerror(errno), kRaiseLimit);
  return std::nullopt;
}

void await_readable(const std::vector<int>& sockets, TimePoint deadline) {
  std::vector<pollfd> entries;
  for (const int socket : sockets) {
    entries.push_back({socket, POLLIN, 0});
  }
  poll(entries.data(), entries.size(), milliseconds_until(deadline));
}

bool write_all(const Socket& socket, const void* data, size_t bytes, TimePoint deadline) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t count =
        send(socket.fd(), static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
    if (count > 0) {
      done += count;
    } else if (errno != EINTR && (errno != EAGAIN || !ready(socket.fd(), POLLOUT, deadline))) {
      return false;
    }
  }
  return true;
}

std::string address_of_this_host(const std::string& interface, const std::string& towards) {
  if (!interface.empty()) {
    const std::string address = address_of_interface(interface);
    SMP_CHECK_WITH(CommError, !address.empty(), "SMP_SOCKET_IFNAME: the network interface ",
                   interface, " has no address. Choose one that `ip address` shows.");
    return address;
  }
  if (is_called_loopback(towards)) {
    return "127.0.0.1";
  }
  std::string address = towards.empty() ? "" : address_towards(towards);
  if (address.empty()) {
    address = address_of_interface("");
  }
  return address.empty() ? "127.0.0.1" : address;
}

}  // namespace smp::comm
