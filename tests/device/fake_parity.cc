// SPDX-License-Identifier: Apache-2.0
#include "tests/device/fake_device.h"
#include "tests/device/parity_suite.h"

namespace smp::testing {

/// Both devices, so that ranks differ in theirs.
at::Device test_device(int rank) { return fake_device(rank % 2); }

void move(torch::nn::Module& module, at::Device device) {
  move_to_fake(module.parameters(), device);
  move_to_fake(module.buffers(), device);
}

}  // namespace smp::testing
