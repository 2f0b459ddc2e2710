// SPDX-License-Identifier: Apache-2.0
#include "core/status_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <sstream>
#include <system_error>
#include <utility>

#include "core/text.h"

namespace smp::core {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostBytes = size_t{16} << 20;  // the names of a million hosts

// Memory that is another's may be anything; the mapping is as large as it says, and stays so.
std::shared_ptr<const StatusMemory> map(const fs::path& path, size_t& bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return nullptr;
  struct stat file {};
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool is_fixed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(fd, &file) == 0;
  bytes = static_cast<size_t>(file.st_size);
  const bool fits = is_fixed && sizeof(StatusMemory) <= bytes && bytes <= kMostBytes;
  void* const data = fits ? mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  if (data == MAP_FAILED) return nullptr;
  return {static_cast<const StatusMemory*>(data), [bytes](const StatusMemory* memory) {
            munmap(const_cast<StatusMemory*>(memory), bytes);
          }};
}

std::vector<std::string> lines_behind(const StatusMemory& memory, size_t bytes) {
  std::istringstream text(
      std::string(reinterpret_cast<const char*>(&memory + 1), bytes - sizeof(StatusMemory)));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(printable(line));
  return lines;
}

}  // namespace

// A process that a rank has forked holds its memory open, too, and is no rank.
std::vector<StatusMapping> map_statuses(pid_t process) {
  std::vector<StatusMapping> statuses;
  const fs::path folder = fs::path("/proc") / std::to_string(process) / "fd";
  std::error_code error;  // the process may end meanwhile
  for (fs::directory_iterator entry(folder, error), end; entry != end; entry.increment(error)) {
    const std::string target = fs::read_symlink(entry->path(), error).string();
    if (target.compare(0, 17, "/memfd:smp-status") != 0) continue;
    size_t bytes = 0;
    auto memory = map(entry->path(), bytes);
    if (memory == nullptr) continue;
    const StatusMemory::Owner& owner = memory->owner;
    const bool is_ours = owner.magic == StatusMemory::kMagic && owner.process == process &&
                         sizeof(StatusMemory) + owner.text_bytes == bytes;
    if (!is_ours) continue;
    auto lines = lines_behind(*memory, bytes);
    if (lines.size() < StatusMapping::kFewestTexts) continue;
    statuses.push_back({std::move(memory), std::move(lines)});
  }
  return statuses;
}

}  // namespace smp::core
