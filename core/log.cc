// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <unistd.h>

#include <array>
#include <utility>

#include "core/check.h"
#include "core/env.h"
#include "core/text.h"

namespace smp::core {
namespace {

constexpr std::array<std::pair<const char*, LogLevel>, 4> kLevels = {{
    {"debug", LogLevel::kDebug},
    {"info", LogLevel::kInfo},
    {"warning", LogLevel::kWarning},
    {"error", LogLevel::kError},
}};

void write_all(const std::string& line) {
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t written = ::write(STDERR_FILENO, line.data() + done, line.size() - done);
    if (written <= 0) return;  // stderr is gone; there is nowhere to say so
    done += static_cast<size_t>(written);
  }
}

LogLevel level_from_environment() {
  const auto name = core::env("SMP_LOG_LEVEL");
  if (!name) return LogLevel::kInfo;
  const auto level = parse_log_level(*name);
  if (!level) {
    write_all(log_line(LogLevel::kWarning,
                       "SMP_LOG_LEVEL: expected debug, info, warning or error, got \"" +
                           printable(*name, 100) + "\"; using info."));
  }
  return level.value_or(LogLevel::kInfo);
}

void log(LogLevel level, const std::string& text) {
  if (level >= log_level()) write_all(log_line(level, text));
}

}  // namespace

std::optional<LogLevel> parse_log_level(const std::string& name) {
  for (const auto& [known, level] : kLevels) {
    if (name == known) return level;
  }
  return std::nullopt;
}

LogLevel log_level() {
  static const LogLevel level = level_from_environment();
  return level;
}

std::string log_line(LogLevel level, const std::string& text) {
  // Plain information needs no label; everything else is worth a second look.
  const std::string label =
      level == LogLevel::kInfo ? "" : std::string(kLevels[static_cast<size_t>(level)].first) + ": ";
  return error_prefix() + label + printable_lines(text) + "\n";
}

void log_debug(const std::string& text) { log(LogLevel::kDebug, text); }
void log_info(const std::string& text) { log(LogLevel::kInfo, text); }
void log_warning(const std::string& text) { log(LogLevel::kWarning, text); }
void log_error(const std::string& text) { log(LogLevel::kError, text); }

}  // namespace smp::core
