// SPDX-License-Identifier: Apache-2.0
#include "core/heap.h"

#include <malloc.h>

#include <limits>

#include "core/env.h"

namespace smp::core {

void keep_freed_memory() {
#if defined(__GLIBC__)
  for (const char* name : {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}) {
    if (env(name)) return;
  }
  // Either setting turns off the adjustment of both; 32 MiB is the most that glibc would adjust to.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
#endif
}

void return_freed_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace smp::core
