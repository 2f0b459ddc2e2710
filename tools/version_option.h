// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "smp/version.h"

namespace smp::tools {

/// Adds `--version`: one line with the versions of smp and of libtorch.
inline void add_version(CLI::App& app) {
  app.set_version_flag("--version",
                       std::string("smp ") + version() + ", libtorch " + libtorch_version(),
                       "Print the versions of smp and of libtorch");
}

}  // namespace smp::tools
