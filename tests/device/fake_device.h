// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

/// A device "fake" (c10::DeviceType::PrivateUse1) with four indices, for tests of the library on a
/// device other than the CPU. Linking it registers it.
///
/// Its streams do their tasks as late as they may, kernels and copies alike: when the host
/// waits for them, directly or for a stream that waits for them. So where a wait is missing, wrong
/// numbers are read. Kernels are the CPU's. Those that draw random numbers, and those whose
/// results' shapes libtorch cannot tell without running them, run at once, after their stream's
/// tasks. A copy to or from the host that is not waited for moves bytes as they lie and is
/// refused where elements would have to be arranged: CUDA then has the host do its part at once,
/// before the device has done its own. Memory that is freed is overwritten when the stream that it
/// was allocated on comes to it, and those that it was recorded on have done their tasks until
/// then.
///
/// Whatever the order in which things happen to run, four rules are checked, and a program that
/// breaks one ends with the text and the stack:
/// - A task that uses memory on one stream waits for the earlier tasks of another stream there,
///   if one of them writes. Allocating counts as writing, since a caching allocator gives
///   memory to the host before its stream has done its tasks there.
/// - Memory that processes share is closed when the host has waited for its reads (those of all
///   threads that have it open, when the last closes it), and freed when no other process has it
///   open.
/// - Memory is freed when the stream that it was allocated on, or the host, has waited for its uses
///   on other streams, or these are recorded (`recordDataPtrOnStream`). As in libtorch's allocator,
///   uses recorded while any stream of the index is captured are forgotten.
/// - Nothing is asked of the device when static objects are destroyed that its first use has made,
///   as libtorch's calls of CUDA make and read one.
namespace smp::testing {

/// The bit of the device's addresses, which is beyond those of programs.
constexpr uintptr_t kOnDevice = uintptr_t{1} << 50;

at::Device fake_device(int index = 0);

/// Moves the tensors there themselves, as `Module::to` does for devices that libtorch knows by
/// name.
void move_to_fake(const std::vector<at::Tensor>& tensors, at::Device device);

/// The calls of streams and events since the last call, in order, one a line: "copy waits for event
/// 0". The default stream is called "compute", others "copy".
std::vector<std::string> take_fake_log();

/// How many graphs were launched since the last call.
int take_fake_launches();

/// How many kernels and copies streams were given since the last call.
int take_fake_kernels();

/// How many streams beside the default ones were taken until now. A caching allocator keeps memory
/// for each.
int fake_streams();

/// While it lives, an index has so many streams beside the default one, which are handed out in
/// turn as libtorch does its 32; otherwise each is another.
class FakeStreamPool {
 public:
  explicit FakeStreamPool(int streams);
  ~FakeStreamPool();
  FakeStreamPool(const FakeStreamPool&) = delete;
  FakeStreamPool& operator=(const FakeStreamPool&) = delete;
};

/// The memory at an address of the device's, as its kernels see it, which are the CPU's. At the
/// address itself the host finds nothing: a read or write there ends the program. Another
/// address stays as it is.
inline void* for_kernels(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) & ~kOnDevice);
}

/// While it lives, each index of the device has so many bytes of memory, counting memory allocated
/// already; an allocation beyond them throws `c10::OutOfMemoryError`, as CUDA's do. Without one
/// there is no limit.
class FakeMemoryLimit {
 public:
  explicit FakeMemoryLimit(size_t bytes);
  ~FakeMemoryLimit();
  FakeMemoryLimit(const FakeMemoryLimit&) = delete;
  FakeMemoryLimit& operator=(const FakeMemoryLimit&) = delete;

  /// The most bytes that an index has had allocated at once since the limit began, or since
  /// `resetPeakStats`.
  size_t peak(int index) const;
};

/// While it lives, an index fails for good after so many more kernels and copies: its streams do
/// nothing any more, and it answers each call with a `c10::AcceleratorError`, as CUDA does after an
/// assertion in a kernel. Freed memory is freed.
class FailingDevice {
 public:
  FailingDevice(int index, int64_t kernels);
  ~FailingDevice();
  FailingDevice(const FailingDevice&) = delete;
  FailingDevice& operator=(const FailingDevice&) = delete;

 private:
  const int index_;
};

/// While it lives, memory of other processes cannot be opened.
class NoFakeIpc {
 public:
  NoFakeIpc();
  ~NoFakeIpc();
  NoFakeIpc(const NoFakeIpc&) = delete;
  NoFakeIpc& operator=(const NoFakeIpc&) = delete;
};

/// While it lives, memory of other processes reads as rubbish.
class RubbishFakeIpc {
 public:
  RubbishFakeIpc();
  ~RubbishFakeIpc();
  RubbishFakeIpc(const RubbishFakeIpc&) = delete;
  RubbishFakeIpc& operator=(const RubbishFakeIpc&) = delete;
};

/// While it lives, no stream comes to an event that processes share: they wait for a process that
/// is gone.
class StuckFakeIpc {
 public:
  StuckFakeIpc();
  ~StuckFakeIpc();
  StuckFakeIpc(const StuckFakeIpc&) = delete;
  StuckFakeIpc& operator=(const StuckFakeIpc&) = delete;
};

/// Bytes of memory that this process has made for others.
size_t fake_ipc_bytes();

/// Bytes of host memory that is pinned for the device. Freed, it is kept until the streams that
/// copy from or to it have done their tasks, and then overwritten.
size_t fake_pinned_bytes();

/// While it lives, notes the rules that are broken instead of ending the program.
class BrokenRules {
 public:
  BrokenRules();
  ~BrokenRules();
  BrokenRules(const BrokenRules&) = delete;
  BrokenRules& operator=(const BrokenRules&) = delete;

  /// Those since the last call, in order: "aten::add on stream 1 of fake:0 reads ...".
  std::vector<std::string> take();
};

/// A use of the device by the host.
struct HostUse {
  std::string what;   ///< "copies Long [4, 8] to the device, waits", "waits for an event" ...
  std::string stack;  ///< the stack of the caller
};

/// While it lives, notes when the host copies to or from the device, and when it waits: for an
/// event, for a stream, in a copy that is waited for, and in operators that on CUDA end with the
/// host reading results of the device (`item`, `equal`, `nonzero` ...). One at a time.
class HostUses {
 public:
  HostUses();
  ~HostUses();
  HostUses(const HostUses&) = delete;
  HostUses& operator=(const HostUses&) = delete;

  /// The uses noted of an index since the last call, in order.
  std::vector<HostUse> take(int index);
};

}  // namespace smp::testing
