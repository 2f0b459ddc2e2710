// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace smp::partitioner {

/// What it takes to bring tensors from one rank to another of the same host, in us: packing on
/// one side, the message, unpacking on the other. Rounded from measurements on a host of two cores
/// with Open MPI over shared memory (1 MiB: 9.4 GB/s; a copy on each side: 5 GB/s).
constexpr double kMessageUs = 20.0;
constexpr double kTensorUs = 5.0;
constexpr double kTransferBytesPerUs = 3000.0;

/// Of one tensor in a message that is sent anyway.
inline double tensor_transfer_us(int64_t bytes) {
  return kTensorUs + static_cast<double>(bytes) / kTransferBytesPerUs;
}

}  // namespace smp::partitioner
