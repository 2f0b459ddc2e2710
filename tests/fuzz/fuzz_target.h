// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

/// The function that libFuzzer calls with inputs that it makes up, and `replay.cc` with those of a
/// folder. Damaged input shall lead to errors of the library; everything else ends the process.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace smp::testing {

/// A file in memory, for readers that take a path.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const;

 private:
  int descriptor_;
};

/// Ends the process if a reader returned a text that it should have refused.
void require(bool ok, const char* what);

}  // namespace smp::testing
