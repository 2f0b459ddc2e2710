// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace smp::core {

/// Writes `text` as one line to stderr, behind the error context of the calling thread: "[smp rank
/// 3] warning: text\n". A single write, so that lines of ranks that share a terminal do not mix.
/// May be called from any thread. Lines below the level of this process are dropped: "debug",
/// "info" (default), "warning" or "error", read once from the environment variable `SMP_LOG_LEVEL`.
/// Any other value is reported once, and means "info".
void log_debug(const std::string& text);
void log_info(const std::string& text);
void log_warning(const std::string& text);
void log_error(const std::string& text);

}  // namespace smp::core
