// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <optional>
#include <utility>

namespace smp::core {

/// The descriptor of an open file, which is closed with this object; or none.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }

  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

/// Reads `size` bytes from `offset`, or those up to the end of the file. Returns how many there
/// were; -1, and `errno`, for an error.
inline ssize_t read_fully(int fd, void* data, size_t size, off_t offset) {
  size_t done = 0;
  while (done < size) {
    const ssize_t got = ::pread(fd, static_cast<char*>(data) + done, size - done,
                                offset + static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return got;
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return static_cast<ssize_t>(done);
}

/// Writes `size` bytes, from `offset` on if there is one. Returns false, with `errno`, for an
/// error.
inline bool write_fully(int fd, const void* data, size_t size, std::optional<off_t> offset = {}) {
  size_t done = 0;
  while (done < size) {
    const char* rest = static_cast<const char*>(data) + done;
    const ssize_t written =
        offset ? ::pwrite(fd, rest, size - done, *offset + static_cast<off_t>(done))
               : ::write(fd, rest, size - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += static_cast<size_t>(written);
  }
  return true;
}

}  // namespace smp::core
