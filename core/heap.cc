// SPDX-License-Identifier: Apache-2.0
#include "core/heap.h"

#include <dlfcn.h>
#include <malloc.h>

#include <atomic>
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
  // Each time looks through all of the heap, so ranks that are threads have one do it for all.
  static std::atomic<int> asked{0};
  if (asked.fetch_add(1) > 0) return;
  int answered = 0;
  do {
    answered = asked.load();
    malloc_trim(0);
  } while (!asked.compare_exchange_strong(answered, 0));
#endif
}

void return_scratch_memory() {
  // Under the name that a library has which MKL is linked into, as libtorch is.
  static auto* const free_buffers =
      reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "mkl_serv_thread_free_buffers"));
  if (free_buffers != nullptr) free_buffers();
}

}  // namespace smp::core
