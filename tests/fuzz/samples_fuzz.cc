// SPDX-License-Identifier: Apache-2.0
// Samples for smp_train. The first byte says the format: idx (the second byte is the length of the
// labels, which come first), tokens (the second and third are their type and the length of a
// sample), or safetensors.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <string>
#include <vector>

#include "smp/error.h"
#include "tests/fuzz/fuzz_target.h"
#include "tools/train/data.h"

namespace {

using smp::tools::train::DataOptions;
using smp::tools::train::Format;
using smp::tools::train::Samples;

const std::vector<std::string> kNames{"input", "target"};

/// Reads the first and the last sample. Numbers of a byte become numbers of eight.
void read(const DataOptions& options, const std::string& path, const std::string& labels,
          size_t size) {
  const Samples samples(options, path, labels, kNames);
  for (const std::string& name : kNames) {
    const at::Tensor rows =
        samples.rows(name, at::tensor({int64_t{0}, samples.size() - 1}, at::kLong));
    smp::testing::require(rows.nbytes() <= 2 * 8 * size, "more bytes than the file has");
    if (rows.numel() > 0) rows.to(at::kDouble).sum();
  }
}

void read_idx(const uint8_t* data, size_t size) {
  DataOptions options;
  options.format = Format::kIdx;
  const size_t length = std::min<size_t>(data[0], size - 1);
  const smp::testing::MemoryFile labels(data + 1, length);
  const smp::testing::MemoryFile images(data + 1 + length, size - 1 - length);
  read(options, images.path(), labels.path(), size);
}

void read_tokens(const uint8_t* data, size_t size) {
  static const std::vector<std::string> kTypes{"uint8", "uint16", "int32", "int64"};
  DataOptions options;
  options.format = Format::kTokens;
  options.token_type = kTypes[data[0] % kTypes.size()];
  options.shift = data[0] >= 128;
  options.sequence = 1 + data[1];
  const smp::testing::MemoryFile file(data + 2, size - 2);
  read(options, file.path(), "", size);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  at::set_num_threads(1);
  if (size < 3) return 0;
  try {
    if (data[0] % 3 == 0) {
      read_idx(data + 1, size - 1);
    } else if (data[0] % 3 == 1) {
      read_tokens(data + 1, size - 1);
    } else {
      const smp::testing::MemoryFile file(data + 1, size - 1);
      read(DataOptions(), file.path(), "", size);
    }
  } catch (const smp::Error&) {
  }
  return 0;
}
