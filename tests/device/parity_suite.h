#pragma once

#include <c10/core/Device.h>

/// Training on a device other than the CPU, compared with plain libtorch on that device. A program
/// links the suite (parity_suite.cc) with a device.
namespace smp::testing {

/// Where rank `rank` of the tests computes.
at::Device test_device(int rank);

}  // namespace smp::testing
