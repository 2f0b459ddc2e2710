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

}  // namespace

ScratchFile::ScratchFile(const std::string& directory)
    : directory_(directory), descriptor_(open_without_name(directory)) {
  SMP_CHECK_WITH(ConfigError, descriptor_, "offload_activations: cannot make a file in ", directory,
                 ": ", std::strerror(errno),
                 ". Set \"offload_directory\" to a directory on a local disk");
}

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
  const bool all = core::write_fully(descriptor_.get(), data, static_cast<size_t>(bytes), offset);
  if (!all) fail("write", bytes, errno);
}

void ScratchFile::read(int64_t offset, void* data, int64_t bytes) const {
  const auto got = core::read_fully(descriptor_.get(), data, static_cast<size_t>(bytes), offset);
  if (got != bytes) fail("read", bytes, got < 0 ? errno : EIO);
}

void ScratchFile::fail(const char* action, int64_t bytes, int error) const {
  core::fail<ConfigError>(
      "offload_activations: cannot ", action, " ", bytes, " bytes of activations in a file in ",
      directory_, ", which has ", end_, " bytes: ", std::strerror(error),
      ". Make room there, set \"offload_directory\" to a directory with more of it, or switch "
      "\"offload_activations\" off");
}

}  // namespace smp::graph
