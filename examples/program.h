// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <iostream>
#include <optional>

/// The main() of an example: `parse` reads the command line into the settings, and says with what
/// status to stop if there is nothing to run; `run` does the work, and what it throws is printed
/// behind `name`.
template <class Settings>
int run_program(const char* name, int argc, char** argv,
                std::optional<int> (*parse)(int, char**, Settings&), void (*run)(const Settings&)) {
  Settings settings;
  if (const auto status = parse(argc, argv, settings)) return *status;
  try {
    run(settings);
  } catch (const c10::Error& error) {
    std::cerr << name << ": " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << "\n";
    return 1;
  }
  return 0;
}
