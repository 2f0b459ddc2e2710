// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace smp::core {

/// The environment variable with the folder in which ranks leave their last words. `smprun` sets
/// it and reads the folder when the job has failed.
constexpr const char* kFailureDirVariable = "SMP_FAILURE_DIR";

/// What one rank wrote before it ended.
struct Failure {
  int rank = 0;
  /// CLOCK_REALTIME in nanoseconds, when the failure was recorded.
  int64_t time_ns = 0;
  std::string message;
};

/// Writes `message` to `<SMP_FAILURE_DIR>/<rank>`, so that the launcher can name the first cause
/// after all ranks have ended. Only the first call of a process writes; without the variable
/// nothing happens. The file appears complete or not at all. May be called from any thread and
/// from a handler that is about to abort: it never throws.
void record_failure(int rank, const std::string& message) noexcept;

/// The failure with the earliest time among the files of `directory`, or nothing when there is
/// none. Files that are not failure records are skipped.
std::optional<Failure> first_failure(const std::string& directory);

}  // namespace smp::core
