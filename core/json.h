// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace smp::core {

/// A text as JSON, without its values.
struct JsonOutline {
  bool is_malformed = false;
  bool is_too_deep = false;  ///< more than 256 levels, which functions that recur could not bear
  std::string repeated;      ///< path of the first key that an object has twice; empty: none
};

/// Looks at `text` to its end, or to the first fault. Takes time by its length.
JsonOutline outline_of(const std::string& text);

/// Parses `text`. Throws `ConfigError` for malformed JSON, with `source_name`, line and column,
/// for a key that occurs twice in one object, with its path, and for more than 256 levels.
nlohmann::json parse_json(const std::string& text, const std::string& source_name);

/// The contents of a file, which errors call `what` ("the configuration file"). Throws
/// `ConfigError` that names it and the reason: a file that is not regular (it might never end), or
/// has more than `most` bytes, is not read.
std::string read_file(const std::string& path, const std::string& what,
                      uint64_t most = uint64_t{64} << 20);

/// The same of a pipe, which can be read once: its content until it is closed, or the error's
/// reason if that is not within `patience`.
std::string read_pipe(const std::string& path, const std::string& what,
                      std::chrono::milliseconds patience, uint64_t most = uint64_t{64} << 20);

}  // namespace smp::core
