// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <unistd.h>

#include <algorithm>
#include <array>

#include "core/check.h"
#include "core/descriptor.h"
#include "core/env.h"
#include "core/text.h"

namespace smp::core {
namespace {

/// The importance of a line, and its names.
enum Level : size_t { kDebug, kInfo, kWarning, kError };
constexpr std::array kLevels = {"debug", "info", "warning", "error"};

void write_line(Level level, const std::string& text) {
  // Plain information needs no label; everything else is worth a second look.
  const std::string label = level == kInfo ? "" : std::string(kLevels[level]) + ": ";
  const std::string line = error_prefix() + label + printable_lines(text) + "\n";
  // It fails where stderr is gone; there is nowhere to say so.
  static_cast<void>(write_fully(STDERR_FILENO, line.data(), line.size()));
}

Level level_from_environment() {
  const std::string name = env("SMP_LOG_LEVEL").value_or(kLevels[kInfo]);
  const auto* const known = std::find(kLevels.begin(), kLevels.end(), name);
  if (known != kLevels.end()) return static_cast<Level>(known - kLevels.begin());
  write_line(kWarning, "SMP_LOG_LEVEL: expected debug, info, warning or error, got \"" +
                           printable(name, 100) + "\"; using info.");
  return kInfo;
}

void log(Level level, const std::string& text) {
  static const Level least = level_from_environment();
  if (level >= least) write_line(level, text);
}

}  // namespace

void log_debug(const std::string& text) { log(kDebug, text); }
void log_info(const std::string& text) { log(kInfo, text); }
void log_warning(const std::string& text) { log(kWarning, text); }
void log_error(const std::string& text) { log(kError, text); }

}  // namespace smp::core
