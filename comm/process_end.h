// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <functional>

namespace smp::comm {

/// Calls `end` once, with the exit status, when this process ends by `exit`: before static objects
/// end that were made before this call.
void at_process_end(void (*end)(int status));

/// Has that come before the end of the static objects that libtorch has made for a device, too:
/// its calls read them, so that what uses the device has to end first. Called when a device is in
/// use; from any thread.
void end_before_objects_of(c10::Device device);

/// Has `let_go` called once by `let_go_of_devices`, unless this has ended. For classes with objects
/// of a device that may belong to a static object: this ends after libtorch's for the device.
class AtWorldEnd {
 public:
  explicit AtWorldEnd(std::function<void()> let_go);
  ~AtWorldEnd();
  AtWorldEnd(const AtWorldEnd&) = delete;
  AtWorldEnd& operator=(const AtWorldEnd&) = delete;
};

/// The process's world ends, and nothing is sent any more. The last made lets go first.
void let_go_of_devices();

}  // namespace smp::comm
