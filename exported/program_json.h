// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "core/json_reader.h"

namespace smp::exported {

/// The version of the format of exported programs that is read and written.
constexpr int64_t kSchemaMajor = 8;
constexpr int64_t kSchemaMinor = 17;  // that is written; any is read
constexpr int64_t kOpset = 10;

/// Reads a program's JSON, which it may not trust: errors are `CheckpointError`s that name `file`.
core::JsonReader program_json(const nlohmann::json& json, std::string file);

/// The only member of a tagged union, `{"as_int": 3}`.
std::pair<std::string, core::JsonReader> tagged(const core::JsonReader& place);
/// A number, or "Infinity", "-Infinity" or "NaN".
double real_of(const core::JsonReader& place);

}  // namespace smp::exported
