// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace smp::core {

/// The value of environment variable `name`, or nothing when it is unset or empty.
std::optional<std::string> env(const char* name);

}  // namespace smp::core
