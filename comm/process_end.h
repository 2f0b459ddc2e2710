// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

namespace smp::comm {

/// Calls `end` once, with the exit status, when this process ends by `exit`: before static objects
/// end that were made before this call.
void at_process_end(void (*end)(int status));

/// Has that come before the end of the static objects that libtorch has made for a device, too:
/// its calls read them, so that what uses the device has to end first. Called when a device is in
/// use; from any thread.
void end_before_objects_of(c10::Device device);

}  // namespace smp::comm
