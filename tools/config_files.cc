// SPDX-License-Identifier: Apache-2.0
// Writes the texts that follow from core/schema_table.cc: docs/configuration.md and a part of
// smp/config.h.
//
//   bazel run //tools:config_files

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "core/env.h"
#include "core/json.h"
#include "tools/config_texts.h"

int main() {
  try {
    // Bazel runs a program elsewhere, and says in this variable where the sources are.
    const std::filesystem::path root = smp::core::env("BUILD_WORKSPACE_DIRECTORY").value_or(".");
    const std::string header = root / "smp/config.h";
    const std::string text = smp::tools::config_header(smp::core::read_file(header, "the header"));
    std::ofstream(header) << text;
    std::ofstream(root / "docs/configuration.md") << smp::tools::configuration_page();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
