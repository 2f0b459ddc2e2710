// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include "comm/communicator.h"
#include "comm/device/ipc.h"

namespace smp::comm {

/// A communicator for tensors of `device` through host memory. Channels go there, too, unless
/// `host` hands tensors over (comm/hand_over.h) or, with `ipc`, the ranks can share memory of their
/// devices. For ranks that share a GPU, where NCCL cannot be used, and for devices that it does not
/// know. Sums are made on the host, by `host`.
CommunicatorPtr make_staged_communicator(CommunicatorPtr host, at::Device device, DeviceIpc* ipc);

}  // namespace smp::comm
