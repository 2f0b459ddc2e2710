// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace mnist {

/// Prints the loss of a training step.
void print_step(int64_t epoch, int64_t step, int64_t steps, double loss);

/// Prints the mean of a loss summed over `count` test digits, and how many were recognised.
void print_test(double loss_sum, int64_t correct, int64_t count);

}  // namespace mnist
