// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "core/descriptor.h"

namespace smp::checkpoint {

/// 64-bit xxHash (XXH64, seed 0) of bytes that are given piece by piece.
class Hasher {
 public:
  Hasher();
  void update(const void* data, size_t size);
  /// The digest of all bytes so far.
  uint64_t digest() const;

 private:
  struct Free {
    void operator()(void* state) const;
  };

  std::unique_ptr<void, Free> state_;
};

/// The medium of a file.
enum class Medium {
  kDisk,
  kMemory,  ///< it does not outlive its machine
};

/// That of the file system that `folder` lies in; kDisk where it cannot be found out.
Medium medium_of(const std::string& folder);

/// Writes a file. On a disk its final name only ever holds complete contents: bytes go to a new
/// file, `path` + ".tmp"; `commit` syncs, reads back and renames, and without it the temporary file
/// is removed, as is one that an earlier save has left. In memory a file that is there is written
/// over, in the memory that it has, and nothing is read back: the folder tells which files are
/// complete. Links are not followed: only the file of this name is written.
class FileWriter {
 public:
  /// Creates the file. Throws CheckpointError if that fails.
  explicit FileWriter(std::string path, Medium medium = Medium::kDisk);
  ~FileWriter();

  /// Appends `size` bytes. Throws CheckpointError (for example: no space left).
  void append(const void* data, size_t size);

  /// Ends the file: makes it durable under its final name, once the content of the disk has been
  /// compared with the appended bytes. Call once, last. Throws CheckpointError.
  void commit();

  /// Bytes appended so far.
  uint64_t size() const { return size_; }

 private:
  void check_stored() const;

  const std::string path_;
  const Medium medium_;
  const std::string written_;  // its name until `commit`
  core::Descriptor fd_;
  uint64_t size_ = 0;
  Hasher hasher_;  // hash of a file on a disk
};

/// A file that is open for reading at any offset.
class FileReader {
 public:
  /// Throws CheckpointError if `path` cannot be opened or is not a regular file.
  explicit FileReader(std::string path);

  /// Size in bytes when it was opened.
  uint64_t size() const { return size_; }

  const std::string& path() const { return path_; }

  /// Reads exactly `size` bytes from `offset`. Throws CheckpointError when the file ends before.
  void read(uint64_t offset, void* data, size_t size) const;

  /// XXH64 of `size` bytes from `offset`, which go through a buffer of 4 MiB. Throws like `read`.
  uint64_t hash(uint64_t offset, uint64_t size) const;

 private:
  std::string path_;
  core::Descriptor fd_;
  uint64_t size_ = 0;
};

/// Raises the limit on open files so that `count` more can be opened, if the system allows it.
void allow_open_files(size_t count);

/// "0123456789abcdef": a hash as indices and messages show it.
std::string hash_text(uint64_t hash);

/// Throws CheckpointError with the failure `what`, and the remedy for an `errno` of this value.
[[noreturn]] void fail_on_disk(const std::string& what, int error);

/// Calls a function that uses std::filesystem, and turns its exceptions into those of
/// `fail_on_disk`. `what` tells the failure: "cannot save checkpoint \"a\"".
template <class Action>
auto on_disk(const std::string& what, const Action& action) {
  try {
    return action();
  } catch (const std::filesystem::filesystem_error& error) {
    fail_on_disk(what + ": " + error.what(), error.code().value());
  }
}

/// The size of the largest file that is read as text, which takes several times its size in memory
/// and a second for some ten MiB: the index of a million tensors.
constexpr uint64_t kMostText = uint64_t{256} << 20;

/// Writes `text` to `path` through a `FileWriter`.
void write_file(const std::string& path, const std::string& text);

/// The whole file as text. Throws CheckpointError, also for one of more than `most` bytes.
std::string read_file(const std::string& path, uint64_t most = kMostText);

/// Makes creations and renames inside `folder` durable. Throws CheckpointError.
void sync_folder(const std::string& folder);

}  // namespace smp::checkpoint
