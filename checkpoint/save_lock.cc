// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/save_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "checkpoint/file.h"
#include "core/check.h"
#include "core/env.h"
#include "core/host.h"
#include "core/log.h"

namespace smp::checkpoint {
namespace {

constexpr size_t kMostOfHolder = 400;

/// " of job 17", where somebody has given it a number.
std::string job_of_this_process() {
  for (const char* variable : {"SMP_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"}) {
    if (const auto job = core::env(variable)) return " of job " + *job;
  }
  return "";
}

/// What a lock's file says of the process that has the lock.
std::string describe_this_process() {
  char since[32] = {};
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  std::strftime(since, sizeof(since), "%Y-%m-%dT%H:%M:%SZ", ::gmtime_r(&now, &utc));
  return c10::str("process ", ::getpid(), job_of_this_process(), " on ", core::host_name(),
                  " saves there, since ", since);
}

/// Empty where the holder has not written it yet.
std::string holder_in(int fd) {
  char text[kMostOfHolder];
  const ssize_t size = ::pread(fd, text, sizeof(text), 0);
  return size > 0 ? std::string(text, static_cast<size_t>(size)) : "another process saves there";
}

/// Takes the lock of an open file: 0, or why not.
int lock(int fd) {
  int result = 0;
  do {
    result = ::flock(fd, LOCK_EX | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

/// Whether the file that is open is still the one of that name: its last holder may have removed
/// it.
bool is_file_at(int fd, const std::string& file) {
  struct stat opened = {}, named = {};
  return ::fstat(fd, &opened) == 0 && ::stat(file.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

}  // namespace

std::string lock_file(const std::string& path) { return path + ".lock"; }

SaveLock::~SaveLock() { release(); }

void SaveLock::take(const std::string& path) {
  while (fd_ < 0 && !try_take(path)) {
  }
}

/// False if the file was removed in between.
bool SaveLock::try_take(const std::string& path) {
  const int fd = ::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) {
    const int error = errno;
    fail_on_disk(c10::str("cannot save checkpoint \"", path, "\": cannot create \"", file_,
                          "\": ", std::strerror(error)),
                 error);
  }
  const int error = lock(fd);
  if (error == EWOULDBLOCK) {
    const std::string holder = holder_in(fd);
    ::close(fd);
    core::fail<CheckpointError>("cannot save checkpoint \"", path, "\": ", holder, " (\"", file_,
                                "\" is locked). Give each job a folder of its own.");
  }
  if (error != 0) {
    core::log_warning(c10::str("cannot lock \"", file_, "\": ", std::strerror(error),
                               ". Another job that saves there at the same time would not be "
                               "noticed: give each job a folder of its own."));
  }
  if (!is_file_at(fd, file_)) {
    ::close(fd);
    return false;
  }
  fd_ = fd;
  const std::string holder = describe_this_process();
  // For messages only: without it the lock holds as well.
  if (::ftruncate(fd_, 0) == 0) (void)!::pwrite(fd_, holder.data(), holder.size(), 0);
  return true;
}

void SaveLock::release() noexcept {
  if (fd_ < 0) return;
  ::unlink(file_.c_str());
  // Not by closing alone: a child of fork() has the descriptor, too.
  ::flock(fd_, LOCK_UN);
  ::close(std::exchange(fd_, -1));
}

}  // namespace smp::checkpoint
