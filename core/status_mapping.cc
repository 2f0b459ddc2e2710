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

namespace smp::core {
namespace {

namespace fs = std::filesystem;

std::shared_ptr<const StatusMemory> map(const fs::path& path, size_t& bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return nullptr;
  struct stat file {};
  const bool is_large =
      fstat(fd, &file) == 0 && static_cast<size_t>(file.st_size) >= sizeof(StatusMemory);
  bytes = static_cast<size_t>(file.st_size);
  void* const data = is_large ? mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  if (data == MAP_FAILED) return nullptr;
  return {static_cast<const StatusMemory*>(data), [bytes](const StatusMemory* memory) {
            munmap(const_cast<StatusMemory*>(memory), bytes);
          }};
}

std::vector<std::string> lines_behind(const StatusMemory& memory) {
  std::istringstream text(
      std::string(reinterpret_cast<const char*>(&memory + 1), memory.owner.text_bytes));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

}  // namespace

// A process that a rank has forked holds its memory open, too, and is no rank.
std::vector<StatusMapping> map_statuses(pid_t process) {
  std::vector<StatusMapping> statuses;
  const fs::path folder = fs::path("/proc") / std::to_string(process) / "fd";
  std::error_code error;  // the process may end meanwhile
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string target = fs::read_symlink(entry.path(), error).string();
    if (target.compare(0, 17, "/memfd:smp-status") != 0) continue;
    size_t bytes = 0;
    auto memory = map(entry.path(), bytes);
    if (memory == nullptr) continue;
    const StatusMemory::Owner& owner = memory->owner;
    const bool is_ours = owner.magic == StatusMemory::kMagic && owner.process == process &&
                         sizeof(StatusMemory) + owner.text_bytes == bytes;
    if (!is_ours) continue;
    auto lines = lines_behind(*memory);
    if (lines.size() < StatusMapping::kFewestTexts) continue;
    statuses.push_back(StatusMapping(std::move(memory), std::move(lines)));
  }
  return statuses;
}

}  // namespace smp::core
