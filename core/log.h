// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace smp::core {

/// How important a line of log is. Lines below the level of this process are dropped.
enum class LogLevel { kDebug, kInfo, kWarning, kError };

/// The level of this process: "debug", "info" (default), "warning" or "error", read once from the
/// environment variable `SMP_LOG_LEVEL`. Any other value is reported once, and means "info".
LogLevel log_level();

/// The level of this name; nothing if it is none of the four.
std::optional<LogLevel> parse_log_level(const std::string& name);

/// One line of log, as it is written: "[smp rank 3] warning: text\n". The prefix is the error
/// context of the calling thread, see `set_error_context`.
std::string log_line(LogLevel level, const std::string& text);

/// Writes `text` as one line to stderr, in a single write so that lines of ranks that share a
/// terminal do not mix. May be called from any thread.
void log_debug(const std::string& text);
void log_info(const std::string& text);
void log_warning(const std::string& text);
void log_error(const std::string& text);

}  // namespace smp::core
