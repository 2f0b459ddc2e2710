// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "core/descriptor.h"

namespace smp::checkpoint {

/// Keeps two saves, of one job or of several, from writing to the same place: a lock on a file,
/// which the system lets go of when the process ends. A file of another program under this name is
/// locked, but neither written nor removed, and links are not followed.
class SaveLock {
 public:
  explicit SaveLock(std::string file) : file_(std::move(file)) {}
  ~SaveLock();

  /// Takes the lock of the checkpoint `path`; does nothing when it is taken already. Throws a
  /// CheckpointError that says who saves there, if another process does. Where the file system has
  /// no locks, it only warns. Throws a CheckpointError, too, if the thing of the file's name cannot
  /// be locked.
  void take(const std::string& path);

  /// Removes the file, if a save has made it. Does nothing unless taken.
  void release() noexcept;

 private:
  bool try_take(const std::string& path);
  core::Descriptor open(const std::string& cannot_save);

  const std::string file_;
  core::Descriptor fd_;
  bool owns_file_ = false;
};

/// The name of the lock's file for the checkpoint `path`; for all of a folder, whose name ends with
/// a slash, that of a file in it.
std::string lock_file(const std::string& path);

}  // namespace smp::checkpoint
