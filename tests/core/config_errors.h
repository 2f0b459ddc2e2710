// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "smp/config.h"
#include "tests/error_of.h"

namespace smp::testing {

/// The error in the parameters of a file; empty if there is none.
inline std::string validation_error(const std::string& json) {
  return error_or_none<ConfigError>([&] { Config::from_json(json, "smp.json").validate(); });
}

/// The reason why a file cannot be read; empty if it can.
inline std::string parse_error(const std::string& json) {
  return error_or_none<ConfigError>([&] { Config::from_json(json, "smp.json"); });
}

/// Text of a file, and the error about it.
struct BadValue {
  const char* json;
  const char* error;
};

}  // namespace smp::testing
