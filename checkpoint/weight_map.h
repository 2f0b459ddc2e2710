// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

namespace smp::checkpoint {

/// "weight_map" of a Hugging Face index (model.safetensors.index.json): the file of each tensor, a
/// plain name without folders. `path` is the index's, for errors. Throws CheckpointError for JSON
/// of another form, and for names that could point out of the folder.
std::map<std::string, std::string> parse_weight_map(const std::string& text,
                                                    const std::string& path);

}  // namespace smp::checkpoint
