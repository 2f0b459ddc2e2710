// SPDX-License-Identifier: Apache-2.0
// An idx file of the MNIST example, plain or gzipped.

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include "examples/mnist/idx_data.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  at::set_num_threads(1);
  const smp::testing::MemoryFile file(data, size);
  try {
    const at::Tensor tensor = mnist::read_idx(file.path());
    // Deflate writes no byte for fewer than 1/1032 of one.
    smp::testing::require(tensor.nbytes() <= 1032 * size, "more bytes than the file can hold");
  } catch (const c10::ValueError&) {
  }
  return 0;
}
