// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace smp::core {

/// Parses `text`. Throws `ConfigError` for malformed JSON, with `source_name`, line and column,
/// and for a key that occurs twice in one object, with its path.
nlohmann::json parse_json(const std::string& text, const std::string& source_name);

/// The contents of a file, which errors call `what` ("the configuration file"). Throws
/// `ConfigError` that names it and the reason.
std::string read_file(const std::string& path, const std::string& what);

}  // namespace smp::core
