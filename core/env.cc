// SPDX-License-Identifier: Apache-2.0
#include "core/env.h"

#include <cstdlib>

namespace smp::core {

std::optional<std::string> env(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

}  // namespace smp::core
