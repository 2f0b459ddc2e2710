// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <iostream>
#include <optional>
#include <type_traits>

/// The main() of an example: `parse` reads the command line into the settings, and says the status
/// with which to stop if there is nothing to run; `run` does the work, and returns the status if it
/// has several. An exception is printed behind `name`.
template <class Settings, class Result>
int run_program(const char* name, int argc, char** argv,
                std::optional<int> (*parse)(int, char**, Settings&),
                Result (*run)(const Settings&)) {
  Settings settings;
  if (const auto status = parse(argc, argv, settings)) return *status;
  try {
    if constexpr (std::is_void_v<Result>) {
      run(settings);
    } else {
      return run(settings);
    }
  } catch (const c10::Error& error) {
    std::cerr << name << ": " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << "\n";
    return 1;
  }
  return 0;
}
