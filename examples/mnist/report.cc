// SPDX-License-Identifier: Apache-2.0
#include "examples/mnist/report.h"

#include <fmt/format.h>

#include <iostream>

namespace mnist {

void print_step(int64_t epoch, int64_t step, int64_t steps, double loss) {
  std::cout << fmt::format("epoch {}, step {}/{}: loss {:.6f}", epoch, step, steps, loss)
            << std::endl;
}

void print_test(double loss_sum, int64_t correct, int64_t count) {
  const auto digits = static_cast<double>(count);
  std::cout << fmt::format("test: average loss {:.4f}, accuracy {}/{} ({:.1f}%)", loss_sum / digits,
                           correct, count, 100 * static_cast<double>(correct) / digits)
            << std::endl;
}

}  // namespace mnist
