// SPDX-License-Identifier: Apache-2.0
#include "tools/job_folder.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "core/check.h"

namespace smp::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "smprun-";
constexpr const char* kLock = "/launcher";

/// The lock of a folder, or -1 if it is somebody's.
int lock(const std::string& folder, int flags) {
  const int fd = ::open((folder + kLock).c_str(), O_RDWR | O_CLOEXEC | flags, 0600);
  if (fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  if (fd >= 0) ::close(fd);
  return -1;
}

void remove(const std::string& folder) {
  std::error_code ignored;  // what is left over in a temporary folder harms nobody
  fs::remove_all(folder, ignored);
}

/// Folders without a lock's file are none that was finished, or another program's.
void remove_those_of_the_dead(const std::string& parent) {
  std::vector<std::string> folders;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parent, ignored)) {
    if (entry.path().filename().string().rfind(kPrefix, 0) == 0) folders.push_back(entry.path());
  }
  for (const std::string& folder : folders) {
    const int fd = lock(folder, 0);
    if (fd < 0) continue;
    remove(folder);
    ::close(fd);
  }
}

}  // namespace

JobFolder::JobFolder(const std::string& parent, const std::string& advice) {
  remove_those_of_the_dead(parent);
  // Under a name that nobody looks for until it is locked.
  std::string made = parent + "/." + kPrefix + "XXXXXX";
  path_ = parent + "/" + kPrefix;
  const bool is_made = mkdtemp(made.data()) != nullptr;
  SMP_CHECK(is_made, "smprun: cannot create the folder ", path_, "XXXXXX: ", std::strerror(errno),
            ". ", advice);
  path_ += made.substr(made.size() - 6);
  lock_ = lock(made, O_CREAT | O_EXCL);
  const bool is_named = ::rename(made.c_str(), path_.c_str()) == 0;
  if (!is_named) remove(made);
  SMP_CHECK(is_named, "smprun: cannot create the folder ", path_, ": ", std::strerror(errno), ". ",
            advice);
}

JobFolder::~JobFolder() {
  remove(path_);
  if (lock_ >= 0) ::close(lock_);
}

}  // namespace smp::tools
