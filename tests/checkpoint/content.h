// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/reader.h"

namespace smp::testing {

/// The content of an undamaged checkpoint: its index with the hashes of all tensors and all states,
/// but for the files in which the tensors lie. Those depend on the layout, and on the plan: so on
/// measured times.
inline nlohmann::json content_of(const std::string& path) {
  checkpoint::Reader reader(path);
  EXPECT_TRUE(reader.find_damage(checkpoint::Reader::Section::kAll).empty()) << path;
  nlohmann::json content = nlohmann::json::parse(reader.index().to_text());
  content.erase("checksum");
  content.erase("files");
  for (auto* tensors : {&content["model"], &content["optimizer"]["tensors"]}) {
    for (auto& tensor : *tensors) tensor.erase("file");
  }
  return content;
}

}  // namespace smp::testing
