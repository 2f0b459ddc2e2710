// SPDX-License-Identifier: Apache-2.0
// The index of a checkpoint, with its checksum put right, which no fuzzer would guess.

#include "checkpoint/index.h"
#include "core/check.h"
#include "tests/fuzz/fuzz_target.h"

namespace {

void parse(const std::string& text) {
  using smp::checkpoint::Index;
  try {
    const Index index = Index::from_text(text, "fuzz");
    const std::string again = index.to_text();
    smp::testing::require(Index::from_text(again, "again").to_text() == again,
                          "an index does not read what it writes");
  } catch (const smp::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  parse(text);
  const size_t key = text.find("\"checksum\": \"");
  if (key != std::string::npos && key + 13 + 16 <= size)
    parse(smp::checkpoint::with_checksum(text));
  return 0;
}
