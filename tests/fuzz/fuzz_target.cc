// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/fuzz_target.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

/// For a process of which libtorch is not instrumented.
extern "C" const char* __asan_default_options() {
  return "detect_leaks=0:detect_container_overflow=0:detect_odr_violation=0";
}

namespace smp::testing {

MemoryFile::MemoryFile(const uint8_t* data, size_t size)
    : descriptor_(memfd_create("fuzz", MFD_CLOEXEC)) {
  require(descriptor_ >= 0, "no memory file");
  require(write(descriptor_, data, size) == static_cast<ssize_t>(size), "no memory");
}

MemoryFile::~MemoryFile() { close(descriptor_); }

std::string MemoryFile::path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

}  // namespace smp::testing
