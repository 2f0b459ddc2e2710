// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include "comm/communicator.h"

namespace smp::comm {

/// A communicator for tensors of `device` through host memory, channels too where `host` does not
/// hand them over (comm/hand_over.h). For ranks that share a GPU, where NCCL cannot be used, and
/// for devices that it does not know. Sums are made on the host, by `host`.
CommunicatorPtr make_staged_communicator(CommunicatorPtr host, at::Device device);

}  // namespace smp::comm
