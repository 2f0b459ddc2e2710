// SPDX-License-Identifier: Apache-2.0
// Schedules, plans, graphs, costs, name maps and logs of hashes: the first byte says which.

#include <ATen/Parallel.h>

#include "core/check.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/readers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  at::set_num_threads(1);
  if (size == 0) return 0;
  const auto& readers = smp::testing::small_readers();
  try {
    readers[data[0] % readers.size()].read({reinterpret_cast<const char*>(data) + 1, size - 1});
  } catch (const smp::Error&) {
  }
  return 0;
}
