// SPDX-License-Identifier: Apache-2.0
// The index of a model in several safetensors files, as Hugging Face's libraries write it.

#include <nlohmann/json.hpp>

#include "checkpoint/pretrained.h"
#include "core/check.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using smp::checkpoint::parse_weight_map;
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const auto files = parse_weight_map(text, "fuzz");
    size_t bytes = 0;
    for (const auto& [name, file] : files) {
      smp::testing::require(!file.empty() && file.find('/') == std::string::npos,
                            "a file out of the folder");
      bytes += name.size() + file.size();
    }
    smp::testing::require(bytes <= size, "more names than the file has");
    const std::string again = nlohmann::json{{"weight_map", files}}.dump();
    smp::testing::require(parse_weight_map(again, "again") == files,
                          "a weight map is not read as it is written");
  } catch (const smp::Error&) {
  }
  return 0;
}
