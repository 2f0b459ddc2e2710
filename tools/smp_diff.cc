// SPDX-License-Identifier: Apache-2.0
// smp_diff: compares the results of two runs, operator by operator. docs/recovery.md

#include <CLI/CLI.hpp>
#include <iostream>
#include <string>

#include "graph/hash_log.h"
#include "tools/hash_diff.h"
#include "tools/program.h"

int main(int argc, char** argv) {
  constexpr int kFoundStatus = 1;
  std::string first, second;
  CLI::App app{
      "Compares what two runs computed, as \"record_hashes\" recorded it; docs/recovery.md.\n"
      "Exit status: 0; 1 if something differs; 2 for errors.",
      "smp_diff"};
  smp::tools::add_version(app);
  app.add_option("first", first, "The folder of a run's hashes")->required();
  app.add_option("second", second, "That of another run")->required();
  CLI11_PARSE(app, argc, argv);
  return smp::tools::status_of([&] {
    smp::graph::HashLogReader a(first), b(second);
    const auto comparison = smp::tools::compare_hashes(a, b);
    std::cout << comparison.text;
    return comparison.are_equal ? 0 : kFoundStatus;
  });
}
