// SPDX-License-Identifier: Apache-2.0
// smp_train: trains a model that Python exported, on any number of ranks. docs/smp_train.md

#include "tools/program.h"
#include "tools/train/options.h"
#include "tools/train/run.h"

int main(int argc, char** argv) {
  smp::tools::train::Options options;
  if (const auto status = smp::tools::train::parse_command_line(argc, argv, options)) {
    return *status;
  }
  return smp::tools::status_of([&] { return smp::tools::train::run(options); });
}
