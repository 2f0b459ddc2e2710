// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace smp::comm {

/// This thread's current stream of a device.
inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// A stream of a device beside the current one. libtorch hands out 32 in turn.
inline c10::Stream side_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

/// Calls `body`, and then `end` in any case: a stream may have been given a part of the work.
/// A device that has failed by then uses nothing any more.
template <class Body, class End>
void run_finally(const Body& body, const End& end) {
  try {
    body();
  } catch (...) {
    try {
      end();
    } catch (const c10::Error&) {  // the device has failed
    }
    throw;
  }
  end();
}

}  // namespace smp::comm
