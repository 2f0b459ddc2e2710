// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include "comm/communicator.h"
#include "comm/device/ipc.h"

namespace smp::comm {

/// A communicator for tensors of `device` through host memory or, with `ipc`, memory of devices
/// that the ranks can share. Channels go there, too, unless `host` hands tensors over
/// (comm/hand_over.h). For ranks that share a GPU, where NCCL cannot be used, and for devices that
/// it does not know. Without `ipc` sums are made on the host, by `host`; with it, `host` has turns.
CommunicatorPtr make_staged_communicator(CommunicatorPtr host, at::Device device, DeviceIpc* ipc);

}  // namespace smp::comm
