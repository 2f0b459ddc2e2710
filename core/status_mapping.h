// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"

namespace smp::core {

/// The status of a rank, mapped by another process.
struct StatusMapping {
  /// Number of texts that do not depend on the number of ranks.
  static constexpr size_t kFewestTexts = 3;

  std::shared_ptr<const StatusMemory> memory;  ///< unmapped with the last copy
  /// The job's identity, its name, the program and each rank's host.
  std::vector<std::string> texts;

  const std::string& job_id() const { return texts.front(); }
};

/// Maps the statuses of the ranks that a process of this user is; none if it cannot be seen in
/// /proc.
std::vector<StatusMapping> map_statuses(pid_t process);

template <class T>
T get(const std::atomic<T>& where) {
  return where.load(std::memory_order_acquire);
}

/// Reads a part again while it is written; in the end as it is, for its writer may be stopped
/// there.
template <class Part, class Read>
void read_part(const Part& part, const Read& read) {
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    const uint32_t version = part.version.load(std::memory_order_acquire);
    read();
    const bool is_whole = version % 2 == 0;
    if (is_whole && part.version.load(std::memory_order_relaxed) == version) return;
  }
}

}  // namespace smp::core
