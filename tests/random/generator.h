// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "tests/random/program.h"

namespace smp::random_programs {

/// The program of a seed: up to 40 instructions on inputs, parameters (one under two names),
/// buffers and constants of several types. Every instruction runs in eager libtorch; whether
/// autograd can go back through all of them shows only when it is tried.
Program generate(uint64_t seed);

}  // namespace smp::random_programs
