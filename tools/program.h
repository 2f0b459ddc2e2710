// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <functional>
#include <iostream>
#include <string>

#include "core/check.h"
#include "smp/error.h"
#include "smp/version.h"

/// The common part of the programs.
namespace smp::tools {

/// Adds `--version`: one line with the versions of smp and of libtorch.
inline void add_version(CLI::App& app) {
  app.set_version_flag("--version",
                       std::string("smp ") + version() + ", libtorch " + libtorch_version(),
                       "Print the versions of smp and of libtorch");
}

/// The exit status that `run` returns; 2 after an error, whose text is printed.
inline int status_of(const std::function<int()>& run) {
  try {
    return run();
  } catch (const Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
  } catch (const c10::Error& error) {  // libtorch's
    std::cerr << core::error_text(error.what_without_backtrace()) << "\n";
  } catch (const std::exception& error) {  // the file system's, memory's
    std::cerr << core::error_text(error.what()) << "\n";
  }
  return 2;
}

}  // namespace smp::tools
