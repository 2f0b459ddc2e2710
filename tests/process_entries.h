// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <iterator>

/// What the system lists of this process.
namespace smp::testing {

inline int64_t entries_of(const char* folder) {
  const std::filesystem::directory_iterator all(folder);
  return std::distance(begin(all), end(all));
}

/// With the one that looking takes.
inline int64_t open_descriptors() { return entries_of("/proc/self/fd"); }

inline int64_t running_threads() { return entries_of("/proc/self/task"); }

}  // namespace smp::testing
