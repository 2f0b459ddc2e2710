// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

// The device that is pretended: the memory that it has given out, and its calls. Kernels compute
// nothing, and copies reach only memory that processes share, so all is done at once. Headers of
// CUDA are not needed: this one and abi.h have the few types that matter.

/// The library hides all but the functions in place of CUDA's.
#define PRETENDED_API extern "C" __attribute__((visibility("default")))

namespace pretended {

/// Values of cudaError_t.
enum Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kAssert = 710,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
};

/// Values of cudaStreamCaptureMode.
enum class Mode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

/// Calls that are counted; launches and copies only where no graph captures them.
enum Count : size_t {
  kLaunches,
  kGraphLaunches,
  kCapturedNodes,
  kCopiesToDevice,
  kCopiesToHost,
  kCopiesOnDevice,
  kFills,
  kWaits,
  kAllocations,
  kCounts,
};

struct Stream;

/// Numbers of nodes of each stream that come before something.
using Before = std::map<const Stream*, size_t>;

struct Capture {
  uint64_t id;
  Mode mode;
  Stream* origin;
  std::thread::id thread;
  bool valid = true;
  size_t nodes = 0;
  Before last = {};  // nodes of each stream that takes part
};
using CapturePtr = std::shared_ptr<Capture>;

struct Stream {
  bool blocking;  // it waits for the default stream, which waits for it
  CapturePtr capture = nullptr;
  Before before = {};
};

struct Event {
  unsigned flags = 0;
  bool recorded = false;
  CapturePtr capture = nullptr;
  Before before = {};
};

struct Graph {
  size_t nodes;
};

/// Each public function is called under the machine's lock.
class Machine {
 public:
  /// Never destroyed: libtorch's own end comes later.
  static Machine& get();
  static std::lock_guard<std::recursive_mutex> lock();

  /// Notes the error for cudaGetLastError, and returns it.
  Error fail(Error error);

  /// kAssert once the device has failed for good.
  Error broken() const { return count(kLaunches) > fail_at ? kAssert : kSuccess; }

  // Memory, which ends a program that touches it.
  Error allocate(void** address, size_t bytes);
  Error release(void* address);
  /// The same for memory of another process.
  Error open(void** address, size_t bytes);
  Error close(void* address);
  /// Bytes of memory made here; 0 for other addresses.
  size_t size_of(const void* address) const;
  bool has(const void* address) const;
  bool is_pinned(const void* address) const;
  size_t total() const { return total_; }
  size_t used() const { return used_; }

  /// Copies between memory of the host and what processes share; other memory of the device is not
  /// looked at, and reads as 0.
  Error copy(void* to, const void* from, size_t bytes, Stream* stream);

  // Captures.
  Error begin(Stream* stream, Mode mode);
  Error end(Stream* stream, Graph** graph);
  /// The capture that a stream takes part in; null if there is none.
  Capture* capture_of(const Stream& stream) const;
  Capture* capture_of(const Event& event) const;

  /// A call that a capture must not see, such as an allocation. Invalidates the captures that it
  /// disturbs.
  Error unsafe();
  /// Gives a stream something to do, which is counted.
  Error work(Stream* stream, Count kind);
  /// Asks whether a stream is done, as it always is.
  Error query(const Stream* stream);
  Error query(const Event& event);
  Error record(Event& event, Stream* stream);
  /// Lets a stream wait for an event.
  Error wait(Stream* stream, const Event& event);

  /// Finds a stream by its handle. Null, 1 and 2 are CUDA's names of the default stream; nullptr
  /// means that it is destroyed.
  Stream* stream_of(void* handle);

  size_t count(Count kind) const { return counts_[kind]; }
  void count_wait() { ++counts_[kWaits]; }

  size_t fail_at;  // so many launches
  std::map<void*, std::unique_ptr<Stream>> streams;
  std::map<const char*, size_t> pinned;  // sizes by address

 private:
  Machine();
  Error add_node(Capture& capture, Stream* stream);
  Error map(void** address, size_t bytes);

  std::map<const char*, size_t> allocations_;  // sizes by address
  std::set<const char*> opened_;               // those of other processes
  size_t total_;
  size_t used_ = 0;
  Stream default_ = {/*blocking=*/true};
  std::set<CapturePtr> captures_;
  uint64_t ids_ = 0;
  std::array<size_t, kCounts> counts_ = {};
};

/// Where what such memory holds lies; null if no processes share it.
char* shared_bytes(const void* address);

/// Memory made here is freed: ends the program if another process has it open.
void forget_shared(const void* memory);

/// State of a thread: the mode that it asked for, and the last error that it was told.
struct Thread {
  Mode mode = Mode::kGlobal;
  Error last = kSuccess;
};
extern thread_local Thread this_thread;

}  // namespace pretended

/// Tells tests and programs how often something was done, by the names that are printed at the end;
/// -1 if there is no such name.
PRETENDED_API long pretended_cuda_count(const char* name);
/// Lets the device fail for good at the launch that comes after so many more.
PRETENDED_API void pretended_cuda_fail_after(size_t launches);
