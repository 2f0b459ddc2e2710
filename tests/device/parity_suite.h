// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

/// Training on a device other than the CPU, compared with plain libtorch on that device. A program
/// links the suite (parity_suite.cc) with a device.
namespace smp::testing {

/// Where rank `rank` of the tests computes.
at::Device test_device(int rank);

/// `module.to(device)`.
void move(torch::nn::Module& module, at::Device device);

}  // namespace smp::testing
