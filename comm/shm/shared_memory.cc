// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <utility>

#include "comm/cuda/pinned_memory.h"
#include "core/check.h"
#include "core/host.h"

namespace smp::comm {
namespace {

// Memory made by this process, by id. Rank threads find each other's here and use one mapping.
struct Registry {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<SharedMemory>> made;
};

Registry& registry() {
  static auto* instance = new Registry;  // tensors may outlive objects that static destructors end
  return *instance;
}

uint64_t random_id() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

std::string name_of(uint64_t id) { return "smp-" + std::to_string(id); }

// The number that follows the word `key` in a file, or with which it begins.
std::optional<uint64_t> number_in(const std::string& file, const std::string& key = "") {
  std::ifstream in(file);
  std::string word;
  while (word != key && in >> word) {
  }
  uint64_t number = 0;
  return in >> number ? std::optional<uint64_t>(number) : std::nullopt;
}

// The files of a cgroup's memory, and the beginning of the keys of its statistics for all below it.
struct CgroupFiles {
  const char* limit;
  const char* used;
  const char* prefix;
};
constexpr CgroupFiles kVersion1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_"};
constexpr CgroupFiles kVersion2 = {"/memory.max", "/memory.current", ""};

std::optional<uint64_t> left_in_cgroup(const std::string& folder, const CgroupFiles& files) {
  const auto limit = number_in(folder + files.limit);
  const auto used = number_in(folder + files.used);
  if (!limit || !used) return std::nullopt;
  const auto cached = [&](const char* list) {  // files that the kernel would drop
    return number_in(folder + "/memory.stat", files.prefix + std::string(list)).value_or(0);
  };
  const uint64_t free = *limit - std::min(*limit, *used);
  return free + cached("inactive_file") + cached("active_file");
}

// MAP_POPULATE: no page faults while messages move.
std::byte* map_pages(int fd, size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

// The error, 0 if there is none. In parts, for a signal undoes the work of the call that it
// interrupts: with a profiler's timer one call for all might never end.
int allocate_pages(int fd, size_t bytes) {
  constexpr size_t kPart = 4 << 20;
  for (size_t begin = 0; begin < bytes;) {
    const size_t length = std::min(kPart, bytes - begin);
    const int error = posix_fallocate(fd, static_cast<off_t>(begin), static_cast<off_t>(length));
    if (error != 0 && error != EINTR) {
      return error;
    }
    begin += error == 0 ? length : 0;
  }
  return 0;
}

std::string megabytes(uint64_t bytes) { return c10::str((bytes + (1 << 20) - 1) >> 20, " MiB"); }

// The kernel would rather end a process than refuse: ask first.
void check_available(size_t bytes) {
  const auto available = available_memory();
  if (available && bytes > *available) {
    SharedMemory::fail(bytes, "only " + megabytes(*available) + " are available");
  }
}

struct Address {
  sockaddr_un address{};
  socklen_t length;
};

// A leading zero makes the name abstract.
Address mailbox_address(uint64_t id) {
  Address result;
  const std::string name = name_of(id);
  result.address.sun_family = AF_UNIX;
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

// Seals that keep a mapping whole, against all other users of the memory.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Whether a rank of this user has made memory that came from elsewhere.
bool is_made_by_a_rank(int fd, size_t bytes, uint64_t id) {
  struct stat status {};
  uint64_t found = 0;
  return fstat(fd, &status) == 0 && status.st_uid == geteuid() &&
         static_cast<size_t>(status.st_size) == bytes &&
         (fcntl(fd, F_GET_SEALS) & kSeals) == kSeals &&
         pread(fd, &found, sizeof found, 0) == sizeof found && found == id;
}

// A message of one byte that carries a descriptor.
struct FdMessage {
  FdMessage() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
  }
  FdMessage(const FdMessage&) = delete;
  FdMessage& operator=(const FdMessage&) = delete;

  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
};

// The descriptor that comes over a connection; -1 if none does.
int receive_fd(int connection) {
  FdMessage message;
  if (recvmsg(connection, &message.header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != 1) {
    return -1;
  }
  const cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  if (control == nullptr || control->cmsg_type != SCM_RIGHTS) {
    return -1;
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(control), sizeof fd);
  return fd;
}

bool send_fd(int connection, int fd) {
  FdMessage message;
  cmsghdr* control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(control), &fd, sizeof fd);
  return sendmsg(connection, &message.header, MSG_DONTWAIT | MSG_NOSIGNAL) == 1;
}

// Whether the process at the other end is of this user: any can know a mailbox's name.
bool is_with_this_user(int connection) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == geteuid();
}

int make_mailbox_socket() {
  return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

}  // namespace

void SharedMemory::fail(size_t bytes, const std::string& reason) {
  core::fail<CommError>(
      "shared memory of ", megabytes(bytes), " for messages between ranks of this host: ", reason,
      ". Use smaller or fewer microbatches, lower \"active_microbatches\", or run fewer ranks on "
      "this host.");
}

std::shared_ptr<SharedMemory> SharedMemory::create(size_t bytes) {
  check_available(bytes);
  const uint64_t id = random_id();
  const int fd = memfd_create(name_of(id).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    fail(bytes, c10::str("memfd_create failed: ", std::strerror(errno)));
  }
  int error = allocate_pages(fd, bytes);
  std::byte* data = nullptr;
  if (error == 0) {
    data = map_pages(fd, bytes);
    error = data == nullptr ? errno : 0;
  }
  if (error != 0) {
    close(fd);
    fail(bytes, std::strerror(error));
  }
  fcntl(fd, F_ADD_SEALS, kSeals);
  std::memcpy(data, &id, sizeof id);
  std::shared_ptr<SharedMemory> memory(new SharedMemory(fd, data, bytes, id));
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().made[id] = memory;
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::map(int fd, size_t bytes, uint64_t id) {
  if (is_made_by_a_rank(fd, bytes, id)) {
    if (std::byte* data = map_pages(fd, bytes)) {
      close(fd);
      return std::shared_ptr<SharedMemory>(new SharedMemory(/*fd=*/-1, data, bytes, id));
    }
  }
  close(fd);
  return nullptr;
}

std::shared_ptr<SharedMemory> SharedMemory::find(uint64_t id) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().made.find(id);
  return found == registry().made.end() ? nullptr : found->second.lock();
}

SharedMemory::SharedMemory(int fd, std::byte* data, size_t size, uint64_t id)
    : fd_(fd), data_(data), size_(size), id_(id) {}

SharedMemory::~SharedMemory() {
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().made.erase(id_);
  }
  if (pinned_) {
    unpin_memory(data_);
  }
  munmap(data_, size_);
  close_fd();
}

void SharedMemory::pin(int index) {
  std::call_once(pin_once_, [&] { pinned_ = pin_memory(data_, size_, index); });
}

void SharedMemory::close_fd() {
  if (fd_ >= 0) {
    close(std::exchange(fd_, -1));
  }
}

std::optional<uint64_t> left_in_cgroups(const std::string& mount, const std::string& cgroups) {
  std::optional<uint64_t> left;
  std::istringstream lines(cgroups);
  for (std::string line; std::getline(lines, line);) {
    // "0::/a/b" of version 2, "4:memory:/a/b" of version 1; a container may not see all of the
    // path.
    const size_t controllers = line.find(':') + 1, path = line.find(':', controllers) + 1;
    if (controllers == 0 || path == 0) continue;
    const std::string of = line.substr(controllers, path - 1 - controllers);
    if (!of.empty() && of != "memory") continue;
    const std::string root = of.empty() ? mount : mount + "/memory";
    std::string folder = line.substr(path);
    for (size_t end = folder.size(); end != std::string::npos; end = folder.rfind('/', end - 1)) {
      const auto here =
          left_in_cgroup(root + folder.substr(0, end), of.empty() ? kVersion2 : kVersion1);
      if (here) left = std::min(left.value_or(*here), *here);
      if (end == 0) break;
    }
  }
  return left;
}

std::optional<uint64_t> available_memory() {
  auto available = number_in("/proc/meminfo", "MemAvailable:");
  if (available) {
    *available *= 1024;
  }
  std::ifstream cgroups("/proc/self/cgroup");
  const auto left =
      left_in_cgroups("/sys/fs/cgroup", {std::istreambuf_iterator<char>(cgroups), {}});
  if (left) available = std::min(available.value_or(*left), *left);
  return available;
}

ProcessId this_process() { return {getpid(), core::namespace_number("/proc/self/ns/pid")}; }

int open_fd_of(const ProcessId& owner, int fd, uint64_t id) {
  if (owner.pid_namespace != this_process().pid_namespace) {
    return -1;
  }
  const std::string path = c10::str("/proc/", owner.pid, "/fd/", fd);
  // Opening anything else could have effects.
  std::array<char, 128> target{};
  const ssize_t length = readlink(path.c_str(), target.data(), target.size());
  const std::string expected = "/memfd:" + name_of(id) + " (deleted)";
  if (length < 0 || expected != std::string(target.data(), static_cast<size_t>(length))) {
    return -1;
  }
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

std::shared_ptr<SharedMemory> open_memory_of(const ProcessId& owner, int fd, uint64_t id,
                                             size_t bytes) {
  if (auto memory = SharedMemory::find(id)) {
    return memory;
  }
  const int opened = open_fd_of(owner, fd, id);
  return opened < 0 ? nullptr : SharedMemory::map(opened, bytes, id);
}

FdMailbox::FdMailbox(uint64_t id) : socket_(make_mailbox_socket()) {
  const Address address = mailbox_address(id);
  const bool bound =
      socket_ >= 0 &&
      bind(socket_, reinterpret_cast<const sockaddr*>(&address.address), address.length) == 0 &&
      listen(socket_, SOMAXCONN) == 0;
  if (!bound && socket_ >= 0) {
    close(std::exchange(socket_, -1));  // nothing can be posted, which the other end will see
  }
}

FdMailbox::~FdMailbox() {
  if (socket_ >= 0) {
    close(socket_);
  }
}

int FdMailbox::take() const {
  int fd = -1;
  while (socket_ >= 0 && fd < 0) {
    const int connection = accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0) {
      break;
    }
    fd = is_with_this_user(connection) ? receive_fd(connection) : -1;
    close(connection);
  }
  return fd;
}

bool post_fd(uint64_t mailbox, int fd) {
  const int connection = make_mailbox_socket();
  if (connection < 0) {
    return false;
  }
  const Address to = mailbox_address(mailbox);
  const bool posted =
      connect(connection, reinterpret_cast<const sockaddr*>(&to.address), to.length) == 0 &&
      is_with_this_user(connection) && send_fd(connection, fd);
  close(connection);
  return posted;
}

// A descriptor that can be read when its process has ended.
class ProcessWatch::PidFd {
 public:
  explicit PidFd(pid_t process)
      : fd_(static_cast<int>(syscall(SYS_pidfd_open, process, 0))) {}  // -1 on old kernels
  PidFd(const PidFd&) = delete;
  PidFd& operator=(const PidFd&) = delete;
  ~PidFd() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }

  bool ended() const {
    pollfd entry{fd_, POLLIN, 0};  // a negative one is left out
    return poll(&entry, 1, 0) == 1;
  }

  // One for all that watch the process. A process that has ended may have left its number to
  // another.
  static std::shared_ptr<PidFd> of(pid_t process) {
    static std::mutex mutex;
    static auto* all = new std::map<pid_t, std::weak_ptr<PidFd>>;  // never destroyed
    const std::lock_guard<std::mutex> lock(mutex);
    std::weak_ptr<PidFd>& entry = (*all)[process];
    auto pidfd = entry.lock();
    if (!pidfd || pidfd->ended()) {
      entry = pidfd = std::make_shared<PidFd>(process);
    }
    return pidfd;
  }

 private:
  const int fd_;
};

ProcessWatch::ProcessWatch(const ProcessId& process) {
  const ProcessId self = this_process();
  if (process.pid_namespace == self.pid_namespace && process.pid != self.pid) {
    pidfd_ = PidFd::of(process.pid);
  }
}

bool ProcessWatch::ended() const { return pidfd_ && pidfd_->ended(); }

}  // namespace smp::comm
