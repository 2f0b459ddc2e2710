// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/weight_map.h"

#include <nlohmann/json.hpp>

#include "checkpoint/untrusted_json.h"
#include "core/check.h"
#include "core/text.h"

namespace smp::checkpoint {

std::map<std::string, std::string> parse_weight_map(const std::string& text,
                                                    const std::string& path) {
  const nlohmann::json index = parse_untrusted(text);
  const bool has_map =
      index.is_object() && index.contains("weight_map") && index["weight_map"].is_object();
  SMP_CHECK_WITH(CheckpointError, has_map, "\"", core::printable(path),
                 "\" is malformed: expected an object \"weight_map\" with the file of each tensor, "
                 "got none. Fetch the files again.");
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    const std::string file_name = file.is_string() ? file.get<std::string>() : "";
    // A name with a slash could point out of the folder.
    const bool is_plain = !file_name.empty() && file_name.find('/') == std::string::npos;
    SMP_CHECK_WITH(CheckpointError, is_plain, "\"", core::printable(path),
                   "\" is malformed: expected the file of tensor \"", core::printable(name),
                   "\" as a plain file name, got ", file.dump(), ". Fetch the files again.");
    files[name] = file_name;
  }
  return files;
}

}  // namespace smp::checkpoint
