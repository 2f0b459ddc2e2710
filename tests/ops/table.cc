// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/ops/report.h"

/// Prints the page of the samples of a folder; without one, of those in the repository. Ends with
/// status 1 if something is wrong, and reports it on stderr.
int main(int argc, char** argv) {
  using namespace smp::op_samples;
  const Report report = run_folder(argc > 1 ? argv[1] : "tests/ops/samples");
  std::fputs(page(report).c_str(), stdout);
  int failures = 0;
  for (const Kind kind : {Kind::kWrong, Kind::kUnlikePython}) {
    for (const Result& result : report.of(kind)) {
      std::fprintf(stderr, "\n%s: %s\n", result.name.c_str(), result.verdict.text.c_str());
      ++failures;
    }
  }
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
