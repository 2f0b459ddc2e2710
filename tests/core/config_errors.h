// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "smp/config.h"
#include "tests/core/error_text.h"

namespace smp::testing {

/// The error in the parameters of a file.
inline std::string validation_error(const std::string& json) {
  return error_text([&] { Config::from_json(json, "smp.json").validate(); });
}

/// Why a file cannot be read.
inline std::string parse_error(const std::string& json) {
  return error_text([&] { Config::from_json(json, "smp.json"); });
}

/// Text of a file, and the error about it.
struct BadValue {
  const char* json;
  const char* error;
};

}  // namespace smp::testing
