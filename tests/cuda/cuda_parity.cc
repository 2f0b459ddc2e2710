// SPDX-License-Identifier: Apache-2.0
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tests/device/parity_suite.h"

namespace smp::testing {

/// One GPU for each rank where there are enough; otherwise several ranks share one.
at::Device test_device(int rank) {
  const int count = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(rank % count)};
}

void move(torch::nn::Module& module, at::Device device) { module.to(device); }

}  // namespace smp::testing
