// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "core/check.h"

namespace smp::partitioner::testing {

/// The text of the error that a call throws.
template <class E = Error>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace smp::partitioner::testing
