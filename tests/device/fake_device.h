// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>
#include <vector>

/// A device "fake" (c10::DeviceType::PrivateUse1) with four indices, for tests of what the library
/// does on a device other than the CPU. Linking it registers it.
///
/// Operators run on the CPU's kernels, at once. Copies that need not be waited for are done as late
/// as its streams and events allow: when the host waits, or when an operator is called on a stream
/// that has waited for them. So where a wait is missing, wrong numbers are read. Such a copy to or
/// from the host moves bytes as they lie and is refused where elements would have to be arranged:
/// CUDA then has the host do its part at once, before the device has done its own. Memory that is
/// freed is overwritten when the stream that it was allocated on, and those it was recorded on,
/// have done what they were given; a copy that still needed it reads or leaves wrong numbers too.
namespace smp::testing {

at::Device fake_device(int index = 0);

/// Moves the tensors there themselves, as `Module::to` does for devices that libtorch knows by
/// name.
void move_to_fake(const std::vector<at::Tensor>& tensors, at::Device device);

/// What was asked of streams and events since the last call, in order, one a line: "copy waits for
/// event 0". The default stream is called "compute", others "copy".
std::vector<std::string> take_fake_log();

/// While it lives, each index of the device has so many bytes of memory, counting what is allocated
/// already; an allocation beyond them throws `c10::OutOfMemoryError`, as CUDA's do. Without one
/// there is no limit.
class FakeMemoryLimit {
 public:
  explicit FakeMemoryLimit(size_t bytes);
  ~FakeMemoryLimit();
  FakeMemoryLimit(const FakeMemoryLimit&) = delete;
  FakeMemoryLimit& operator=(const FakeMemoryLimit&) = delete;

  /// The most bytes that an index has had allocated at once since the limit began.
  size_t peak(int index) const;
};

/// What the host had to do with the device.
struct HostUse {
  std::string what;   ///< "copies Long [4, 8] to the device, waits", "waits for an event" ...
  std::string stack;  ///< who asked for it
};

/// While it lives, notes when the host copies to or from the device, and when it waits: for an
/// event, for a stream, in a copy that is waited for, and in operators that on CUDA end with the
/// host reading what the device has made (`item`, `equal`, `nonzero` ...). One at a time.
class HostUses {
 public:
  HostUses();
  ~HostUses();
  HostUses(const HostUses&) = delete;
  HostUses& operator=(const HostUses&) = delete;

  /// What was noted of an index since the last call, in order.
  std::vector<HostUse> take(int index);
};

}  // namespace smp::testing
