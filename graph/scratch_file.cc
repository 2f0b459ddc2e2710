// SPDX-License-Identifier: Apache-2.0
#include "graph/scratch_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "core/check.h"

namespace smp::graph {
namespace {

constexpr int64_t kBlock = 4096;

int64_t whole_blocks(int64_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

/// A file that has no name, or loses it at once where the file system knows no others; -1 and
/// errno if there is none.
int open_without_name(const std::string& directory) {
  const int descriptor = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return descriptor;
  std::string path = directory + "/smp-XXXXXX";
  const int named = mkostemp(path.data(), O_CLOEXEC);
  if (named >= 0) unlink(path.c_str());
  return named;
}

/// Calls `transfer(done)`, which moves some of the bytes after the first `done`, until all are.
/// Returns 0 or the error.
template <class Transfer>
int repeat(int64_t bytes, const Transfer& transfer) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t moved = transfer(done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return EIO;
    done += moved;
  }
  return 0;
}

}  // namespace

ScratchFile::ScratchFile(const std::string& directory)
    : directory_(directory), descriptor_(open_without_name(directory)) {
  SMP_CHECK_WITH(ConfigError, descriptor_ >= 0, "offload_activations: cannot make a file in ",
                 directory, ": ", std::strerror(errno),
                 ". Set \"offload_directory\" to a directory on a local disk");
}

ScratchFile::~ScratchFile() { close(descriptor_); }

int64_t ScratchFile::allocate(int64_t bytes) {
  bytes = whole_blocks(bytes);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [offset, size] = *it;
    if (size < bytes) continue;
    free_.erase(it);
    if (size > bytes) free_[offset + bytes] = size - bytes;
    return offset;
  }
  end_ += bytes;
  return end_ - bytes;
}

void ScratchFile::free(int64_t offset, int64_t bytes) {
  auto block = free_.emplace(offset, whole_blocks(bytes)).first;
  const auto next = std::next(block);
  if (next != free_.end() && block->first + block->second == next->first) {
    block->second += next->second;
    free_.erase(next);
  }
  if (block == free_.begin()) return;
  const auto before = std::prev(block);
  if (before->first + before->second != block->first) return;
  before->second += block->second;
  free_.erase(block);
}

void ScratchFile::write(int64_t offset, const void* data, int64_t bytes) const {
  const auto* from = static_cast<const char*>(data);
  const int error = repeat(bytes, [&](int64_t done) {
    return pwrite(descriptor_, from + done, static_cast<size_t>(bytes - done), offset + done);
  });
  if (error != 0) fail("write", bytes, error);
}

void ScratchFile::read(int64_t offset, void* data, int64_t bytes) const {
  auto* to = static_cast<char*>(data);
  const int error = repeat(bytes, [&](int64_t done) {
    return pread(descriptor_, to + done, static_cast<size_t>(bytes - done), offset + done);
  });
  if (error != 0) fail("read", bytes, error);
}

void ScratchFile::fail(const char* action, int64_t bytes, int error) const {
  core::fail<ConfigError>(
      "offload_activations: cannot ", action, " ", bytes, " bytes of activations in a file in ",
      directory_, ", which has ", end_, " bytes: ", std::strerror(error),
      ". Make room there, set \"offload_directory\" to a directory with more of it, or switch "
      "\"offload_activations\" off");
}

}  // namespace smp::graph
