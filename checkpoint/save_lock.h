// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::checkpoint {

/// Keeps two saves from writing the same checkpoint at once, of one job or of several: a lock on
/// the file `path`.lock, which the system lets go of when the process ends.
class SaveLock {
 public:
  explicit SaveLock(const std::string& path);
  ~SaveLock();
  SaveLock(const SaveLock&) = delete;
  SaveLock& operator=(const SaveLock&) = delete;

  /// Throws a CheckpointError that says who saves there, if somebody does. Where the file system
  /// has no locks, it only warns.
  void take();

  /// Removes the file. Does nothing unless taken.
  void release() noexcept;

 private:
  bool try_take();

  const std::string path_;
  const std::string file_;
  int fd_ = -1;
};

/// The name of the lock's file for the checkpoint `path`.
std::string lock_file(const std::string& path);

}  // namespace smp::checkpoint
