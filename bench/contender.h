// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <iostream>
#include <string>

#include "bench/measure.h"

namespace bench {

/// Serves bench/contenders.py: says when it is set up and, after `warm` steps, when it is ready,
/// waits for a line before the first and before each further step, and prints how many seconds it
/// took. `speaks` on one of the ranks, which wait for each other by `barrier`.
inline void take_steps(int64_t warm, int64_t steps, bool speaks,
                       const std::function<void()>& barrier, const std::function<void()>& step) {
  std::string line;
  if (speaks) std::cout << "set up" << std::endl;
  if (speaks) std::getline(std::cin, line);
  barrier();
  for (int64_t i = 0; i < warm; ++i) step();
  if (speaks) std::cout << "ready" << std::endl;
  for (int64_t i = 0; i < steps; ++i) {
    if (speaks && !std::getline(std::cin, line)) break;
    barrier();
    const double time = seconds(step);
    if (speaks) std::cout << time << std::endl;
  }
}

}  // namespace bench
