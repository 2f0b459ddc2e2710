// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace smp::comm {

/// Memory that processes of one host share. It has no name in any file system (memfd_create), so
/// nothing is left behind however they end, and does not count against the size of /dev/shm.
///
/// It starts with a random number, its id, which a process that maps it checks. Its size is sealed:
/// no process can shrink it.
class SharedMemory {
 public:
  /// The bytes at the start that users must leave alone.
  static constexpr size_t kReserved = 64;

  /// Zeros. All pages are there when it returns, so that a lack of memory shows here and not when
  /// they are touched. Throws `CommError` that says how much was asked for and is there.
  static std::shared_ptr<SharedMemory> create(size_t bytes);

  /// Maps the memory of another process by a file descriptor, which it closes. Null when it is not
  /// the memory `id` of so many bytes.
  static std::shared_ptr<SharedMemory> map(int fd, size_t bytes, uint64_t id);

  /// Finds memory that this process has made and still holds, as the same object; otherwise null.
  static std::shared_ptr<SharedMemory> find(uint64_t id);

  /// Throws the error that there is none, as `create` does.
  [[noreturn]] static void fail(size_t bytes, const std::string& reason);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  uint64_t id() const { return id_; }
  /// The descriptor of memory made here; -1 for others, which need none.
  int fd() const { return fd_; }

  /// Closes the descriptor, which is not needed once all have mapped it.
  void close_fd();

  /// Lets GPUs copy to and from it by themselves, in a CUDA build; GPU `index` is woken for it.
  /// From any thread.
  void pin(int index);

 private:
  SharedMemory(int fd, std::byte* data, size_t size, uint64_t id);

  int fd_;
  std::byte* data_;
  size_t size_;
  uint64_t id_;
  std::once_flag pin_once_;
  bool pinned_ = false;
};

/// The bytes that processes of this host may still take, by the kernel's estimate and the memory
/// limits of this process's cgroups; nothing where neither is told.
std::optional<uint64_t> available_memory();
/// Memory that limits leave, of cgroups of version 1 or 2 in `mount`: those in which a process is
/// whose /proc/self/cgroup says `cgroups`, and those around them.
std::optional<uint64_t> left_in_cgroups(const std::string& mount, const std::string& cgroups);

/// A process as others find it: its number counts in its PID namespace only.
struct ProcessId {
  pid_t pid;
  uint64_t pid_namespace;
};
ProcessId this_process();

/// Opens the shared memory that a process holds as `fd` by way of /proc; -1 where that is not
/// possible: another PID namespace or user, no /proc.
int open_fd_of(const ProcessId& owner, int fd, uint64_t id);

/// That memory, of `bytes`: the owner's own object if it is this process. Null where it cannot be
/// mapped.
std::shared_ptr<SharedMemory> open_memory_of(const ProcessId& owner, int fd, uint64_t id,
                                             size_t bytes);

/// Takes a file descriptor from another process: a socket with an abstract name, which no file is
/// made for. For processes in one network namespace.
class FdMailbox {
 public:
  /// `id` names it.
  explicit FdMailbox(uint64_t id);
  FdMailbox(const FdMailbox&) = delete;
  FdMailbox& operator=(const FdMailbox&) = delete;
  ~FdMailbox();

  /// A descriptor that post_fd of this user has sent; -1 if there is none.
  int take() const;

 private:
  int socket_;
};

/// False where it cannot be delivered, or another user has the mailbox. When true, it can be taken
/// at once.
bool post_fd(uint64_t mailbox, int fd);

/// Tells when a process has ended, even if no process has waited for it yet. All that watch one
/// process share a descriptor.
class ProcessWatch {
 public:
  /// The process is alive. One of another PID namespace, and this one itself, never seems to end.
  explicit ProcessWatch(const ProcessId& process);

  bool ended() const;

 private:
  class PidFd;

  std::shared_ptr<PidFd> pidfd_;
};

}  // namespace smp::comm
