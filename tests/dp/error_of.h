// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <string>

namespace smp::dp::testing {

/// The text of the E that a body throws, on any rank; empty if it throws nothing.
template <class E = std::exception>
std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

}  // namespace smp::dp::testing
