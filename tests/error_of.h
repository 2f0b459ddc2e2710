// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <initializer_list>
#include <string>

#include "smp/error.h"

/// Checks of error texts.
namespace smp::testing {

/// Runs `action`, which must throw an E, and returns the text.
template <class E = Error>
std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    EXPECT_NE(dynamic_cast<const E*>(&error), nullptr)
        << "an error of another type: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

/// Runs `action` and returns the text of the E that it throws; an empty one if it throws nothing.
template <class E = Error>
std::string error_or_none(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

/// `text` has each of these in it.
inline void expect_has(const std::string& text, std::initializer_list<std::string> parts) {
  for (const auto& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << part << "\" is not in: " << text;
  }
}
inline void expect_has(const std::string& text, const std::string& part) {
  expect_has(text, {part});
}

}  // namespace smp::testing
