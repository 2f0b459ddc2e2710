// SPDX-License-Identifier: Apache-2.0
#include "tests/checkpoint/file_calls.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>
#include <vector>

namespace smp::testing {
namespace {

constexpr size_t kDescriptors = 4096;

// Not on the heap: calls come before main() and after it.
char folder[4096] = "";
Fault fault = Fault::kNone;
int64_t faulty_call = 0;
std::atomic<int64_t> calls{0};
uint64_t space = std::numeric_limits<uint64_t>::max();  // space of all files in the folder
std::array<std::atomic<bool>, kDescriptors> watched{};
std::function<void()>* before_read = nullptr;

bool is_watched(const char* path) {
  const size_t length = std::strlen(folder);
  return length > 0 && std::strncmp(path, folder, length) == 0;
}

bool is_watched(int descriptor) {
  return descriptor >= 0 && static_cast<size_t>(descriptor) < kDescriptors && watched[descriptor];
}

/// Counts a call and gives the fault at it.
Fault next() {
  const int64_t call = calls++;
  if (call == faulty_call) return fault;
  const bool lasts = fault == Fault::kNoSpace || fault == Fault::kFlipBit;
  return lasts && call > faulty_call ? fault : Fault::kNone;
}

[[noreturn]] void die() {
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;) pause();
}

void stop() { syscall(SYS_kill, getpid(), SIGSTOP); }

/// A call that takes no bytes: false if it must fail.
bool may_go_on(bool takes_space) {
  const Fault now = next();
  if (now == Fault::kKill) die();
  if (now == Fault::kStop) stop();
  if (now != Fault::kNoSpace || !takes_space) return true;
  errno = ENOSPC;
  return false;
}

/// Not from the function that it calls.
void call_before_read() {
  std::function<void()>* what = std::exchange(before_read, nullptr);
  if (what == nullptr) return;
  (*what)();
  before_read = what;
}

int open_at(int base, const char* path, int flags, mode_t mode) {
  const bool watch = is_watched(path) || (base != AT_FDCWD && is_watched(base));
  const bool creates = (flags & O_CREAT) != 0;
  if (watch && creates && !may_go_on(/*takes_space=*/true)) return -1;
  if (watch && !creates) call_before_read();
  const int descriptor = static_cast<int>(syscall(SYS_openat, base, path, flags, mode));
  if (descriptor >= 0 && static_cast<size_t>(descriptor) < kDescriptors) {
    watched[descriptor] = watch;
  }
  return descriptor;
}

ssize_t write_flipped(int descriptor, const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  std::vector<char> copy(bytes, bytes + size);
  copy[size / 2] ^= 0x20;
  fault = Fault::kNone;
  return syscall(SYS_write, descriptor, copy.data(), size);
}

/// How many of `size` bytes still fit into the folder.
size_t room_for(size_t size) {
  if (space == std::numeric_limits<uint64_t>::max()) return size;
  uint64_t used = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) used += entry.file_size();
  }
  return used < space ? std::min<uint64_t>(size, space - used) : 0;
}

}  // namespace

void inject(const std::string& path, Fault what, int64_t call) {
  space = std::numeric_limits<uint64_t>::max();
  before_read = nullptr;
  std::snprintf(folder, sizeof(folder), "%s", path.c_str());
  fault = what;
  faulty_call = call;
  calls = 0;
}

void limit_space(const std::string& path, uint64_t bytes) {
  inject(path, Fault::kNone, 0);
  space = bytes;
}

void before_reads(const std::string& path, std::function<void()> what) {
  static std::function<void()> kept;
  inject(path, Fault::kNone, 0);
  kept = std::move(what);
  before_read = &kept;
}

int64_t calls_so_far() { return calls; }

}  // namespace smp::testing

using namespace smp::testing;

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return open_at(AT_FDCWD, path, flags, mode);
}

int openat(int base, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return open_at(base, path, flags, mode);
}

int close(int descriptor) {
  if (is_watched(descriptor)) watched[descriptor] = false;
  return static_cast<int>(syscall(SYS_close, descriptor));
}

ssize_t write(int descriptor, const void* data, size_t size) {
  if (is_watched(descriptor)) {
    switch (next()) {
      case Fault::kKill:
        syscall(SYS_write, descriptor, data, size / 2);
        die();
      case Fault::kStop:
        stop();
        break;
      case Fault::kNoSpace:
        errno = ENOSPC;
        return -1;
      case Fault::kFlipBit:
        return write_flipped(descriptor, data, size);
      case Fault::kNone:
        break;
    }
    const size_t room = room_for(size);
    if (room == 0 && size > 0) {
      errno = ENOSPC;
      return -1;
    }
    size = room;
  }
  return syscall(SYS_write, descriptor, data, size);
}

int fsync(int descriptor) {
  if (is_watched(descriptor) && !may_go_on(/*takes_space=*/true)) return -1;
  return static_cast<int>(syscall(SYS_fsync, descriptor));
}

int rename(const char* from, const char* to) noexcept {
  if (is_watched(to) && !may_go_on(/*takes_space=*/false)) return -1;
  return static_cast<int>(syscall(SYS_rename, from, to));
}

int mkdir(const char* path, mode_t mode) noexcept {
  if (is_watched(path) && !may_go_on(/*takes_space=*/true)) return -1;
  return static_cast<int>(syscall(SYS_mkdir, path, mode));
}

int unlink(const char* path) noexcept {
  if (is_watched(path) && !may_go_on(/*takes_space=*/false)) return -1;
  return static_cast<int>(syscall(SYS_unlink, path));
}

int rmdir(const char* path) noexcept {
  if (is_watched(path) && !may_go_on(/*takes_space=*/false)) return -1;
  return static_cast<int>(syscall(SYS_rmdir, path));
}

int unlinkat(int base, const char* path, int flags) noexcept {
  if (is_watched(base) || is_watched(path)) may_go_on(/*takes_space=*/false);
  return static_cast<int>(syscall(SYS_unlinkat, base, path, flags));
}

int remove(const char* path) noexcept {
  if (is_watched(path)) may_go_on(/*takes_space=*/false);
  if (syscall(SYS_unlink, path) == 0) return 0;
  return errno == EISDIR || errno == EPERM ? static_cast<int>(syscall(SYS_rmdir, path)) : -1;
}
}
