// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <iterator>

/// The entries of this process that the system lists.
namespace smp::testing {

inline int64_t entries_of(const char* folder) {
  const std::filesystem::directory_iterator all(folder);
  return std::distance(begin(all), end(all));
}

/// Counts the one that looking takes, too.
inline int64_t open_descriptors() { return entries_of("/proc/self/fd"); }

inline int64_t running_threads() { return entries_of("/proc/self/task"); }

}  // namespace smp::testing
