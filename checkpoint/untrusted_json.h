// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace smp::checkpoint {

/// Parses JSON of unknown origin; a text that is none, has an object with the same key twice, or is
/// nested deeper than 256 levels, which functions that recur over it could not bear, is a discarded
/// value (`is_discarded()`). Never throws.
nlohmann::json parse_untrusted(const std::string& text);

}  // namespace smp::checkpoint
