// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "core/descriptor.h"

namespace smp::graph {

/// A file without a name, in which blocks are written, read and freed. Blocks may be written and
/// read by several threads at a time; `allocate` and `free` are for one.
class ScratchFile {
 public:
  /// Throws `ConfigError` if there can be no file in `directory`.
  explicit ScratchFile(const std::string& directory);

  /// The place of a block of `bytes`: the first that is free, else at the end.
  int64_t allocate(int64_t bytes);
  void free(int64_t offset, int64_t bytes);

  /// Throw `ConfigError`.
  void write(int64_t offset, const void* data, int64_t bytes) const;
  void read(int64_t offset, void* data, int64_t bytes) const;

  /// The most bytes that it held.
  int64_t size() const { return end_; }

 private:
  [[noreturn]] void fail(const char* action, int64_t bytes, int error) const;

  const std::string directory_;
  const core::Descriptor descriptor_;
  int64_t end_ = 0;
  std::map<int64_t, int64_t> free_;  // offset -> bytes; neighbours are joined
};

}  // namespace smp::graph
