// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include "comm/communicator.h"

namespace smp::comm {

/// A communicator for tensors of `device` through host memory: what is sent is copied to the host
/// first, for which this waits, and what is received is copied to the device by `Work::wait()`. For
/// ranks that share a GPU, where NCCL cannot be used, and for devices that it does not know. Sums
/// are made on the host, by `host`.
CommunicatorPtr make_staged_communicator(CommunicatorPtr host, at::Device device);

}  // namespace smp::comm
