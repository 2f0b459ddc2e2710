// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "core/check.h"

namespace smp::testing {

/// The text of the `E` that `action` throws; a text that no error has when it throws nothing.
template <class E = ConfigError>
std::string error_text(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what_without_backtrace();
  }
  return "<no error>";
}

}  // namespace smp::testing
