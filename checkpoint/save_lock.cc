// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/save_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "checkpoint/file.h"
#include "core/check.h"
#include "core/env.h"
#include "core/host.h"
#include "core/log.h"
#include "core/text.h"

namespace smp::checkpoint {
namespace {

using core::Descriptor;

constexpr size_t kMostOfHolder = 400;
constexpr const char* kBegin = "process ";
constexpr const char* kSavesThere = " saves there, since ";

/// " of job 17", where the job has a number.
std::string job_of_this_process() {
  for (const char* variable : {"SMP_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"}) {
    if (const auto job = core::env(variable)) return " of job " + core::printable(*job, 64);
  }
  return "";
}

/// The description of the process that has a lock, in the lock's file.
std::string describe_this_process() {
  char since[32] = {};
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  std::strftime(since, sizeof(since), "%Y-%m-%dT%H:%M:%SZ", ::gmtime_r(&now, &utc));
  return c10::str(kBegin, ::getpid(), job_of_this_process(), " on ",
                  core::printable(core::host_name(), 64), kSavesThere, since);
}

/// The description in the file, from the save that made it, or made it before it was ended. Empty
/// if another program wrote it: the file may be used as a lock then, and is left as it is.
std::string holder_in(int fd) {
  char bytes[kMostOfHolder];
  const ssize_t size = ::pread(fd, bytes, sizeof(bytes), 0);
  const std::string text(bytes, static_cast<size_t>(std::max<ssize_t>(size, 0)));
  const bool is_ours = text.compare(0, std::strlen(kBegin), kBegin) == 0 &&
                       text.find(kSavesThere) != std::string::npos;
  return is_ours ? core::printable(text, kMostOfHolder) : "";
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
  return ::fstat(fd, &opened) == 0 && ::lstat(file.c_str(), &named) == 0 &&
         opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
}

bool is_regular(int fd) {
  struct stat status = {};
  return ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

void write_holder(int fd) {
  const std::string ours = describe_this_process();
  // For messages only: without it the lock holds as well. The file is never empty meanwhile.
  if (::pwrite(fd, ours.data(), ours.size(), 0) == static_cast<ssize_t>(ours.size())) {
    (void)!::ftruncate(fd, static_cast<off_t>(ours.size()));
  }
}

constexpr int kFlags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;

/// A new file of that name: none and `errno` if there is one, or there can be none. It appears
/// locked and with its holder where the file system has files without a name: a save that is killed
/// before leaves nothing, and others never find it without its holder.
Descriptor make_lock(const std::string& file) {
  const std::string folder = file.substr(0, file.rfind('/') + 1);
  constexpr int kUnnamed = O_TMPFILE | O_RDWR | O_CLOEXEC;
  if (Descriptor fd(::open(folder.empty() ? "." : folder.c_str(), kUnnamed, 0644)); fd) {
    lock(fd.get());
    write_holder(fd.get());
    const std::string path = c10::str("/proc/self/fd/", fd.get());
    if (::linkat(AT_FDCWD, path.c_str(), AT_FDCWD, file.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      return fd;
    }
  }
  return Descriptor(::open(file.c_str(), kFlags | O_CREAT | O_EXCL, 0644));
}

/// Opens the lock's file, which `is_new` if there was none: none and `errno` if it cannot. Follows
/// no link, and waits for no other end of a pipe.
Descriptor open_lock(const std::string& file, bool& is_new) {
  for (;;) {
    Descriptor fd = make_lock(file);
    is_new = static_cast<bool>(fd);
    if (is_new || errno != EEXIST) return fd;
    fd = Descriptor(::open(file.c_str(), kFlags));
    if (fd || errno != ENOENT) return fd;  // else it was removed in between
  }
}

}  // namespace

std::string lock_file(const std::string& path) { return path + ".lock"; }

SaveLock::~SaveLock() { release(); }

void SaveLock::take(const std::string& path) {
  while (!fd_ && !try_take(path)) {
  }
}

/// Opens the file for `try_take`.
Descriptor SaveLock::open(const std::string& cannot_save) {
  Descriptor fd = open_lock(file_, owns_file_);
  const int error = fd ? 0 : errno;
  if (!fd && error != ELOOP && error != ENXIO) {
    fail_on_disk(c10::str(cannot_save, "cannot create \"", core::printable(file_),
                          "\": ", std::strerror(error)),
                 error);
  }
  SMP_CHECK_WITH(CheckpointError, fd && is_regular(fd.get()), cannot_save, "expected at \"",
                 core::printable(file_),
                 "\" no file, or one that can be locked, got a link or something else. "
                 "Remove it, or save elsewhere.");
  return fd;
}

/// False if the file was removed in between.
bool SaveLock::try_take(const std::string& path) {
  const std::string cannot_save =
      c10::str("cannot save checkpoint \"", core::printable(path), "\": ");
  Descriptor fd = open(cannot_save);
  const int error = lock(fd.get());
  const std::string holder = holder_in(fd.get());
  SMP_CHECK_WITH(CheckpointError, error != EWOULDBLOCK, cannot_save,
                 holder.empty() ? "another process has locked it" : holder, " (\"",
                 core::printable(file_), "\" is locked). Give each job a folder of its own.");
  if (error != 0) {
    core::log_warning(c10::str("cannot lock \"", core::printable(file_),
                               "\": ", std::strerror(error),
                               ". Another job that saves there at the same time would not be "
                               "noticed: give each job a folder of its own."));
  }
  if (!is_file_at(fd.get(), file_)) return false;
  fd_ = std::move(fd);
  owns_file_ = owns_file_ || !holder.empty();
  if (owns_file_) write_holder(fd_.get());
  return true;
}

void SaveLock::release() noexcept {
  if (!fd_) return;
  if (owns_file_ && is_file_at(fd_.get(), file_)) ::unlink(file_.c_str());
  // Not by closing alone: a child of fork() has the descriptor, too.
  ::flock(fd_.get(), LOCK_UN);
  fd_ = Descriptor();
}

}  // namespace smp::checkpoint
