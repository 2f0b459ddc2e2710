// SPDX-License-Identifier: Apache-2.0
// The configuration's JSON.

#include "core/check.h"
#include "smp/config.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto config = smp::Config::from_json({reinterpret_cast<const char*>(data), size}, "fuzz");
    config.validate();
    const std::string text = config.to_json();
    smp::testing::require(smp::Config::from_json(text, "again").to_json() == text,
                          "a configuration does not read what it writes");
  } catch (const smp::Error&) {
  }
  return 0;
}
