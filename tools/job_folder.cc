// SPDX-License-Identifier: Apache-2.0
#include "tools/job_folder.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "core/check.h"

namespace smp::tools {
namespace {

using core::Descriptor;
namespace fs = std::filesystem;

constexpr const char* kPrefix = "smprun-";
constexpr const char* kMarker = "launcher";
constexpr std::string_view kContent = "a folder of an smprun job\n";

/// Writes the marker of a folder and locks it. Returns the lock; none, and errno, if there can be
/// none.
Descriptor mark(const std::string& folder) {
  const std::string file = folder + "/" + kMarker;
  Descriptor marker(::open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const bool is_locked = marker &&
                         core::write_fully(marker.get(), kContent.data(), kContent.size()) &&
                         ::flock(marker.get(), LOCK_EX | LOCK_NB) == 0;
  return is_locked ? std::move(marker) : Descriptor();
}

/// Whether an open file is this user's, and of that type.
bool is_own(int fd, mode_t type) {
  struct stat entry {};
  return ::fstat(fd, &entry) == 0 && (entry.st_mode & S_IFMT) == type &&
         entry.st_uid == ::geteuid();
}

/// The lock of a folder that a launcher has made and no launcher has; none for any other.
Descriptor lock_of_the_dead(const std::string& folder) {
  const Descriptor directory(
      ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!is_own(directory.get(), S_IFDIR)) return Descriptor();
  constexpr int kFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  Descriptor marker(::openat(directory.get(), kMarker, kFlags));
  std::array<char, kContent.size() + 1> content{};
  const bool is_marker = is_own(marker.get(), S_IFREG) &&
                         ::read(marker.get(), content.data(), content.size()) ==
                             static_cast<ssize_t>(kContent.size()) &&
                         kContent == content.data();
  return is_marker && ::flock(marker.get(), LOCK_EX | LOCK_NB) == 0 ? std::move(marker)
                                                                    : Descriptor();
}

void remove_all_but_the_marker(const std::string& folder) {
  std::error_code ignored;  // the folder is kept for files that cannot be removed
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().filename() != kMarker) fs::remove_all(entry.path(), ignored);
  }
}

/// Where others still write, the folder stays, with a marker, for the next launcher.
void remove(const std::string& folder) {
  constexpr int kAttempts = 3;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    remove_all_but_the_marker(folder);
    ::unlink((folder + "/" + kMarker).c_str());
    if (::rmdir(folder.c_str()) == 0 || errno == ENOENT) return;
    mark(folder);
  }
}

void remove_those_of_the_dead(const std::string& parent) {
  std::vector<std::string> folders;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parent, ignored)) {
    if (entry.path().filename().string().rfind(kPrefix, 0) == 0) folders.push_back(entry.path());
  }
  for (const std::string& folder : folders) {
    if (const Descriptor lock = lock_of_the_dead(folder)) remove(folder);
  }
}

}  // namespace

JobFolder::JobFolder(const std::string& parent, const std::string& advice) {
  remove_those_of_the_dead(parent);
  path_ = parent + "/" + kPrefix;
  const auto check = [&](bool is_done) {
    SMP_CHECK(is_done, "smprun: cannot create the folder ", path_, "XXXXXX: ", std::strerror(errno),
              ". ", advice);
  };
  // Under a name that launchers do not look for until it is locked.
  std::string made = parent + "/." + kPrefix + "XXXXXX";
  check(mkdtemp(made.data()) != nullptr);
  const std::string path = path_ + made.substr(made.size() - 6);
  lock_ = mark(made);
  const bool is_named = lock_ && ::rename(made.c_str(), path.c_str()) == 0;
  if (!is_named) {
    const int error = errno;
    remove(made);
    errno = error;
  }
  check(is_named);
  path_ = path;
}

JobFolder::~JobFolder() { remove(path_); }

}  // namespace smp::tools
