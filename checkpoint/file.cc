// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/text.h"

namespace smp::checkpoint {
namespace {

constexpr uint64_t kBufferBytes = uint64_t{4} << 20;

void check_system(bool ok, const char* action, const std::string& path) {
  const int error = errno;  // kept before the message allocates
  if (!ok)
    fail_on_disk(
        c10::str("cannot ", action, " \"", core::printable(path), "\": ", std::strerror(error)),
        error);
}

[[noreturn]] void fail_in_the_way(const std::string& path) {
  core::fail<CheckpointError>("cannot create \"", core::printable(path),
                              "\": something that is no file of a save has this name. Remove it, "
                              "or save elsewhere.");
}

/// Removes the file of an earlier save that did not come to its end. Other links to it, and its
/// target if it is a link, stay as they are.
void remove_left(const std::string& path) {
  struct stat status = {};
  if (::lstat(path.c_str(), &status) != 0) return;
  if (!S_ISREG(status.st_mode)) fail_in_the_way(path);
  check_system(::unlink(path.c_str()) == 0, "remove", path);
}

XXH64_state_t* xxh(void* state) { return static_cast<XXH64_state_t*>(state); }

}  // namespace

Hasher::Hasher() : state_(XXH64_createState()) { XXH64_reset(xxh(state_.get()), /*seed=*/0); }

void Hasher::Free::operator()(void* state) const { XXH64_freeState(xxh(state)); }

void Hasher::update(const void* data, size_t size) { XXH64_update(xxh(state_.get()), data, size); }

uint64_t Hasher::digest() const { return XXH64_digest(xxh(state_.get())); }

Medium medium_of(const std::string& folder) {
  struct statfs status = {};
  if (::statfs(folder.c_str(), &status) != 0) return Medium::kDisk;
  const bool in_memory = status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC;
  return in_memory ? Medium::kMemory : Medium::kDisk;
}

FileWriter::FileWriter(std::string path, Medium medium)
    : path_(std::move(path)),
      medium_(medium),
      written_(medium == Medium::kDisk ? path_ + ".tmp" : path_) {
  const int is_new = medium == Medium::kDisk ? O_EXCL : 0;
  if (is_new != 0) remove_left(written_);
  constexpr int kNoOther = O_NOFOLLOW | O_NONBLOCK;  // no link's target, no pipe that waits
  constexpr int kFlags = O_WRONLY | O_CREAT | O_CLOEXEC | kNoOther;
  fd_ = core::Descriptor(::open(written_.c_str(), kFlags | is_new, 0644));
  check_system(static_cast<bool>(fd_), "create", written_);
  struct stat status = {};
  const bool is_file = ::fstat(fd_.get(), &status) == 0 && S_ISREG(status.st_mode);
  if (!is_file) fail_in_the_way(written_);
}

FileWriter::~FileWriter() {
  if (fd_) ::unlink(written_.c_str());
}

void FileWriter::append(const void* data, size_t size) {
  check_system(core::write_fully(fd_.get(), data, size), "write", written_);
  if (medium_ == Medium::kDisk) hasher_.update(data, size);
  size_ += size;
}

/// The pages that were synced are dropped, so that this asks the disk where the file system lets
/// it.
void FileWriter::check_stored() const {
  ::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_DONTNEED);
  const FileReader stored(written_);
  const uint64_t got = stored.hash(0, std::min(size_, stored.size()));
  SMP_CHECK_WITH(CheckpointError, stored.size() == size_ && got == hasher_.digest(), "\"",
                 core::printable(written_), "\" was not stored as it was written: expected ", size_,
                 " bytes with xxh64 ", hash_text(hasher_.digest()), ", got ", stored.size(),
                 " bytes with ", hash_text(got),
                 ". The disk or its file system is at fault: save to another one.");
}

void FileWriter::commit() {
  if (medium_ == Medium::kDisk) {
    check_system(::fsync(fd_.get()) == 0, "sync", written_);
    check_stored();
    check_system(::rename(written_.c_str(), path_.c_str()) == 0, "rename to its final name",
                 written_);
  } else {
    // The old file may have been longer.
    check_system(::ftruncate(fd_.get(), static_cast<off_t>(size_)) == 0, "write", written_);
  }
  // From here on nothing is left to remove, whatever close() says.
  check_system(::close(fd_.release()) == 0, "close", path_);
}

FileReader::FileReader(std::string path) : path_(std::move(path)) {
  // Without O_NONBLOCK opening a pipe would wait for its writer.
  fd_ = core::Descriptor(::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  check_system(static_cast<bool>(fd_), "open", path_);
  struct stat status = {};
  SMP_CHECK_WITH(CheckpointError, ::fstat(fd_.get(), &status) == 0 && S_ISREG(status.st_mode),
                 "cannot read \"", core::printable(path_), "\": expected a regular file.");
  size_ = static_cast<uint64_t>(status.st_size);
}

void allow_open_files(size_t count) {
  constexpr rlim_t kOthers = 512;  // sockets, shared memory, the user's
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= count + kOthers) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, count + kOthers);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

void FileReader::read(uint64_t offset, void* data, size_t size) const {
  const ssize_t got = core::read_fully(fd_.get(), data, size, static_cast<off_t>(offset));
  check_system(got >= 0, "read", path_);
  SMP_CHECK_WITH(CheckpointError, static_cast<size_t>(got) == size, "\"", core::printable(path_),
                 "\" is truncated: expected ", size, " bytes at offset ", offset, ", got ", got,
                 ". Use another checkpoint.");
}

uint64_t FileReader::hash(uint64_t offset, uint64_t size) const {
  std::vector<char> buffer(std::min(size, kBufferBytes));
  Hasher hasher;
  for (uint64_t done = 0; done < size;) {
    const uint64_t piece = std::min<uint64_t>(buffer.size(), size - done);
    read(offset + done, buffer.data(), piece);
    hasher.update(buffer.data(), piece);
    done += piece;
  }
  return hasher.digest();
}

std::string hash_text(uint64_t hash) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016" PRIx64, hash);
  return text;
}

void fail_on_disk(const std::string& what, int error) {
  SMP_CHECK_WITH(CheckpointError, error != ENOSPC && error != EDQUOT, what,
                 ". The disk is full: free some space or save elsewhere. Checkpoints that were "
                 "saved before are as they were.");
  core::fail<CheckpointError>(what, ". Check the path, its permissions and the free space.");
}

void write_file(const std::string& path, const std::string& text) {
  FileWriter file(path);
  file.append(text.data(), text.size());
  file.commit();
}

std::string read_file(const std::string& path, uint64_t most) {
  const FileReader file(path);
  SMP_CHECK_WITH(CheckpointError, file.size() <= most, "cannot read \"", core::printable(path),
                 "\": expected at most ", most, " bytes of text, got ", file.size(),
                 ". It is not the file that was written: use another one.");
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

void sync_folder(const std::string& folder) {
  const core::Descriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  check_system(static_cast<bool>(fd), "open folder", folder);
  check_system(::fsync(fd.get()) == 0, "sync folder", folder);
}

}  // namespace smp::checkpoint
