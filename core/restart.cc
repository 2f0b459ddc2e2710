// SPDX-License-Identifier: Apache-2.0
#include "core/restart.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/env.h"
#include "core/failure.h"

namespace smp::core {
namespace {

constexpr const char* kSteps = "/steps";              // a number of a fixed width, written over
constexpr const char* kCheckpoints = "/checkpoints";  // a JSON string a line

/// One call, so that whoever is killed has written all of it or nothing. Errors are ignored.
void write_once(const char* file, int flags, const std::string& text) noexcept {
  const int fd = ::open(file, O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0600);
  if (fd < 0) return;
  (void)!::write(fd, text.data(), text.size());
  ::close(fd);
}

}  // namespace

void note_steps(int64_t steps) noexcept {
  const auto directory = env(kFailureDirVariable);
  if (!directory) return;
  char text[32];
  std::snprintf(text, sizeof(text), "%20lld\n", static_cast<long long>(steps));
  write_once((*directory + kSteps).c_str(), 0, text);
}

void note_checkpoint(const std::string& path) noexcept {
  const auto directory = env(kFailureDirVariable);
  if (!directory) return;
  const std::string line = nlohmann::json(path).dump(-1, ' ', /*ensure_ascii=*/true,
                                                     nlohmann::json::error_handler_t::replace);
  write_once((*directory + kCheckpoints).c_str(), O_APPEND, line + "\n");
}

std::optional<JobProgress> read_progress(const std::string& directory) {
  JobProgress progress;
  if (!(std::ifstream(directory + kSteps) >> progress.steps)) return std::nullopt;
  std::ifstream lines(directory + kCheckpoints);
  for (std::string line; std::getline(lines, line);) {
    const auto path = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (path.is_string()) progress.checkpoints.push_back(path);  // a full disk has cut others
  }
  return progress;
}

std::string Restart::to_text() const {
  return nlohmann::json{
      {"number", number}, {"steps", before.steps}, {"checkpoints", before.checkpoints}}
      .dump();
}

std::optional<Restart> this_restart() {
  const auto text = env(kRestartVariable);
  if (!text) return std::nullopt;
  const auto json = nlohmann::json::parse(*text);
  return Restart{
      json.at("number").get<int>(),
      {json.at("steps").get<int64_t>(), json.at("checkpoints").get<std::vector<std::string>>()}};
}

}  // namespace smp::core
