// SPDX-License-Identifier: Apache-2.0
#include "core/restart.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "core/check.h"
#include "core/env.h"
#include "core/failure.h"

namespace smp::core {
namespace {

constexpr const char* kSteps = "/steps";              // a number of a fixed width, written over
constexpr const char* kCheckpoints = "/checkpoints";  // JSON, [path, steps], a line
constexpr const char* kKeptSteps = "/kept";           // like kSteps
constexpr const char* kConfiguration = "/configuration";
constexpr const char* kArrival = "arrived-";  // and the rank: an empty file
constexpr const char* kRankVariable = "OMPI_COMM_WORLD_RANK";

/// Writes in one call, so that a process that is killed has written all of it or nothing. Errors
/// are ignored.
void write_once(const char* file, int flags, const std::string& text) noexcept {
  const int fd = ::open(file, O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0600);
  if (fd < 0) return;
  (void)!::write(fd, text.data(), text.size());
  ::close(fd);
}

void note(const char* name, int flags, const std::string& text) noexcept {
  auto directory = env(kFailureDirVariable);
  if (!directory) directory = env(kRecoveryDirVariable);
  if (directory) write_once((*directory + name).c_str(), flags, text);
}

std::string fixed_width(int64_t steps) {
  char text[32];
  std::snprintf(text, sizeof(text), "%20lld\n", static_cast<long long>(steps));
  return text;
}

/// A path is bytes, and JSON has characters: of U+0000 to U+00FF, one for each byte.
std::string to_characters(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80) text += static_cast<char>(0xC0 | byte >> 6);
    text += static_cast<char>(byte >= 0x80 ? 0x80 | (byte & 0x3F) : byte);
  }
  return text;
}

/// The inverse, of UTF-8 that it has written.
std::string to_bytes(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto first = static_cast<unsigned char>(text[i]);
    const bool is_pair = first >= 0x80 && i + 1 < text.size();
    bytes += static_cast<char>(is_pair ? (first & 0x3) << 6 | (text[++i] & 0x3F) : first);
  }
  return bytes;
}

nlohmann::json to_json(const SavedCheckpoint& checkpoint) {
  return nlohmann::json::array({to_characters(checkpoint.path), checkpoint.steps});
}

SavedCheckpoint checkpoint_of(const nlohmann::json& json) {
  return {to_bytes(json.at(0).get<std::string>()), json.at(1).get<int64_t>()};
}

Restart restart_of(const nlohmann::json& json) {
  JobProgress before{json.at("steps").get<int64_t>(), {}, {}};
  for (const auto& item : json.at("checkpoints")) {
    before.checkpoints.push_back(checkpoint_of(item));
  }
  if (json.contains("kept_steps")) before.kept_steps = json.at("kept_steps").get<int64_t>();
  return Restart{json.at("number").get<int>(), std::move(before)};
}

/// The restart that torchrun's agent describes.
std::optional<Restart> restart_by_agent() {
  const auto directory = env(kRecoveryDirVariable);
  const auto count = env("TORCHELASTIC_RESTART_COUNT");
  const int number = directory && count ? std::atoi(count->c_str()) : 0;
  if (number == 0) return std::nullopt;
  return Restart{number, read_progress(*directory).value_or(JobProgress())};
}

}  // namespace

std::string kept_copy_path(const std::string& folder) { return folder + "/copy"; }

void note_arrival() noexcept {
  const auto rank = env(kRankVariable);  // smprun starts ranks by mpirun
  if (rank && env(kFailureDirVariable)) note(("/" + (kArrival + *rank)).c_str(), 0, "");
}

std::set<int> read_arrivals(const std::string& directory) {
  std::set<int> ranks;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(kArrival, 0) == 0) ranks.insert(std::atoi(name.c_str() + std::strlen(kArrival)));
  }
  return ranks;
}

void note_steps(int64_t steps) noexcept { note(kSteps, 0, fixed_width(steps)); }

void note_kept_copy(int64_t steps) noexcept { note(kKeptSteps, 0, fixed_width(steps)); }

void note_checkpoint(const SavedCheckpoint& checkpoint) noexcept {
  note(kCheckpoints, O_APPEND, to_json(checkpoint).dump(-1, ' ', /*ensure_ascii=*/true) + "\n");
}

void note_configuration(const std::string& json) noexcept { note(kConfiguration, O_TRUNC, json); }

std::optional<std::string> read_configuration(const std::string& directory) {
  std::string json;
  if (!std::getline(std::ifstream(directory + kConfiguration), json)) return std::nullopt;
  return json;
}

std::optional<JobProgress> read_progress(const std::string& directory) {
  JobProgress progress;
  if (!(std::ifstream(directory + kSteps) >> progress.steps)) return std::nullopt;
  std::ifstream lines(directory + kCheckpoints);
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    // A full disk cuts lines.
    if (!json.is_discarded()) progress.checkpoints.push_back(checkpoint_of(json));
  }
  int64_t kept = 0;
  if (std::ifstream(directory + kKeptSteps) >> kept) progress.kept_steps = kept;
  return progress;
}

std::string Restart::to_text() const {
  auto checkpoints = nlohmann::json::array();
  for (const auto& checkpoint : before.checkpoints) checkpoints.push_back(to_json(checkpoint));
  nlohmann::json json = {
      {"number", number}, {"steps", before.steps}, {"checkpoints", std::move(checkpoints)}};
  if (before.kept_steps) json["kept_steps"] = *before.kept_steps;
  return json.dump();
}

Restart Restart::from_text(const std::string& text) {
  try {
    return restart_of(nlohmann::json::parse(text));
  } catch (const nlohmann::json::exception&) {
    fail<ConfigError>("the environment variable ", kRestartVariable,
                      ": expected what smprun sets for a job that it starts again, got ", text,
                      ". Unset it, and leave it to smprun --restarts or \"recovery\"");
  }
}

std::optional<Restart> this_restart() {
  const auto text = env(kRestartVariable);
  return text ? std::optional(Restart::from_text(*text)) : restart_by_agent();
}

}  // namespace smp::core
