// SPDX-License-Identifier: Apache-2.0
// A safetensors file.

#include <ATen/Parallel.h>

#include "checkpoint/safetensors.h"
#include "core/check.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  at::set_num_threads(1);
  const smp::testing::MemoryFile file(data, size);
  try {
    const smp::checkpoint::SafetensorsReader reader(file.path());
    uint64_t bytes = 0;
    for (const auto& [name, entry] : reader.entries()) {
      const at::Tensor tensor = reader.read(name);
      smp::testing::require(smp::checkpoint::hash_of(tensor) == reader.hash(name), "other bytes");
      bytes += tensor.nbytes();
    }
    smp::testing::require(bytes < size, "more bytes than the file has");
  } catch (const smp::Error&) {
  }
  return 0;
}
