// SPDX-License-Identifier: Apache-2.0
// smp_train: trains a model that Python exported, on any number of ranks. docs/smp_train.md

#include <c10/util/Exception.h>

#include <exception>
#include <iostream>

#include "core/check.h"
#include "smp/error.h"
#include "tools/train/options.h"
#include "tools/train/run.h"

int main(int argc, char** argv) {
  constexpr int kErrorStatus = 2;
  smp::tools::train::Options options;
  if (const auto status = smp::tools::train::parse_command_line(argc, argv, options)) {
    return *status;
  }
  try {
    return smp::tools::train::run(options);
  } catch (const smp::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
  } catch (const c10::Error& error) {  // libtorch's
    std::cerr << smp::core::error_text(error.what_without_backtrace()) << "\n";
  } catch (const std::exception& error) {  // the file system's, memory's
    std::cerr << smp::core::error_text(error.what()) << "\n";
  }
  return kErrorStatus;
}
