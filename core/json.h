// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace smp::core {

/// Parses `text`. Throws `ConfigError` for malformed JSON, with `source_name`, line and column,
/// for a key that occurs twice in one object, with its path, and for more than 256 levels.
nlohmann::json parse_json(const std::string& text, const std::string& source_name);

/// Parses JSON of unknown origin; a text that is none, has an object with the same key twice, or is
/// nested deeper than 256 levels, which functions that recur over it could not bear, is a discarded
/// value (`is_discarded()`). Never throws.
nlohmann::json parse_untrusted(const std::string& text);

/// The contents of a file, which errors call `what` ("the configuration file"). Throws
/// `ConfigError` that names it and the reason: a file that is not regular (it might never end), or
/// has more than `most` bytes, is not read.
std::string read_file(const std::string& path, const std::string& what,
                      uint64_t most = uint64_t{64} << 20);

/// The same of a pipe, which can be read once: its content until it is closed, or the error's
/// reason if that is not within `patience`.
std::string read_pipe(const std::string& path, const std::string& what,
                      std::chrono::milliseconds patience, uint64_t most = uint64_t{64} << 20);

/// Writes a file anew. Throws `ConfigError` with the path, `failure` ("cannot write the graph"),
/// the reason, and the remedy as a sentence without its full stop.
void write_file(const std::string& path, const std::string& text, const std::string& failure,
                const std::string& remedy = "Give a path in a folder that can be written");

}  // namespace smp::core
