// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

namespace smp::checkpoint {

/// Keeps two saves, of one job or of several, from writing to the same place: a lock on a file,
/// which the system lets go of when the process ends.
class SaveLock {
 public:
  explicit SaveLock(std::string file) : file_(std::move(file)) {}
  ~SaveLock();
  SaveLock(const SaveLock&) = delete;
  SaveLock& operator=(const SaveLock&) = delete;

  /// For the checkpoint `path`; does nothing when it is taken already. Throws a CheckpointError
  /// that says who saves there, if somebody else does. Where the file system has no locks, it only
  /// warns.
  void take(const std::string& path);

  /// Removes the file. Does nothing unless taken.
  void release() noexcept;

 private:
  bool try_take(const std::string& path);

  const std::string file_;
  int fd_ = -1;
};

/// The name of the lock's file for the checkpoint `path`; for all of a folder, whose name ends with
/// a slash, that of a file in it.
std::string lock_file(const std::string& path);

}  // namespace smp::checkpoint
