// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/device/ipc.h"

namespace smp::comm {

/// Memory and events of any kind of device as threads of one process share them: as they are.
/// Memory stays on the device of the thread that has made it.
DeviceIpc& thread_memory();

}  // namespace smp::comm
