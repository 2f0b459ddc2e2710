// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/device/fake_device.h"

/// The parts of the fake device (fake_device.h): streams, events and memory.
namespace smp::testing {

inline constexpr auto kFakeType = c10::DeviceType::PrivateUse1;
inline constexpr int kFakeDevices = 4;
inline constexpr size_t kFakeMemory = size_t{1} << 30;  // bytes of each that it says it has

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

StreamKey key_of(const c10::Stream& stream);

/// How far streams are known to be: of each, how many of its tasks.
using Clock = std::map<StreamKey, uint64_t>;

/// Memory that a task reads or writes: [begin, end).
struct Access {
  const char* begin;
  const char* end;
  bool writes;
};

/// The name of a task that overwrites memory of a graph's, which no other device has.
constexpr const char* kRelease = "a release";

/// Work that a stream is given.
struct Task {
  std::string name;  ///< "aten::add", "a copy"
  std::vector<Access> accesses;
  std::function<void()> run;
  /// The call of a random operator in its graph that it belongs to: it then runs at once; -1: none.
  int random_call = -1;
};

/// Memory of graphs: given back when the last of them is gone, and until then to the next captures.
struct FakePool {
  ~FakePool();
  std::set<char*> free;  ///< blocks
  std::set<char*> all;
  int uses = 0;          ///< graphs, and a capture that goes on
  bool is_over = false;  ///< for ever, when the last of these is gone
};

/// The tasks of a stream while it was captured.
struct FakeCapture {
  std::shared_ptr<FakePool> pool;
  std::vector<Task> tasks;
};

/// The point in a stream where an event was recorded.
struct FakeEvent {
  int number = 0;
  StreamKey stream;
  uint64_t position = 0;
  Clock clock;  ///< the work that is done when the event is
  bool is_timed = false;
};

/// All streams and all memory of the device. One lock is held while anything is asked of it, and
/// while its tasks run.
class FakeMachine {
 public:
  static FakeMachine& get();

  std::recursive_mutex mutex;

  /// Puts a task at the stream's end, and looks whether it may use its memory there.
  void give(StreamKey stream, Task task);
  /// Does the tasks of the stream. The host knows no more than before.
  void run_all(StreamKey stream);
  /// Waits until the work is done, which the host knows then.
  void synchronize(StreamKey stream);

  StreamKey new_stream(c10::DeviceIndex index);
  /// The next of the pool.
  StreamKey pool_stream(c10::DeviceIndex index);
  int streams() const { return static_cast<int>(streams_); }
  /// Into `event`, or into a new one if it is null.
  void record(FakeEvent*& event, StreamKey stream);
  void block(const FakeEvent& event, StreamKey stream);
  /// Each time it is asked, the stream may have got one task further.
  bool query(const FakeEvent& event);
  bool query(StreamKey stream);
  void synchronize(const FakeEvent& event);

  /// From now on the stream does none of its tasks, but notes them; a wait for one is an error.
  void begin_capture(StreamKey stream, std::shared_ptr<FakePool> pool);
  std::vector<Task> end_capture(StreamKey stream);
  bool is_captured(StreamKey stream) const { return captures_.count(stream) > 0; }

  /// An index that has failed works again, without the tasks that it has not done.
  void mend(c10::DeviceIndex index);
  /// A call that reads the static object of fake_device.h's last rule, and makes it the first time.
  static void check_call();
  /// Throws a `c10::AcceleratorError` if the stream's index has failed.
  void refuse_failed(StreamKey stream) const;

  /// Throws `c10::OutOfMemoryError` beyond the limit.
  void* allocate(size_t bytes, StreamKey stream);
  /// The stream that allocated it does this when it comes to it.
  void free(void* memory) noexcept;
  void free(FakePool& pool) noexcept;
  void record_use(void* memory, StreamKey stream);

  /// Memory that processes share: there for all streams at once, as CUDA's is, and freed when all
  /// tasks that use it are done.
  void add_block(char* memory, size_t bytes, StreamKey owner) {
    blocks_[memory] = {bytes, owner, {}, {}};
  }
  void remove_block(char* memory);
  /// Such memory is closed by the process that reads it: the host knows that it has. Streams that
  /// write there are those of its maker, which may go on.
  void check_close(const char* memory);

  void* allocate_pinned(size_t bytes);
  void free_pinned(void* memory) noexcept;
  /// If the memory is pinned, it is the stream's until its copy is done.
  void use_pinned(const void* memory, StreamKey stream);
  bool is_pinned(const void* memory) const { return find_pinned(memory) != pinned_.end(); }
  size_t pinned_bytes() const { return pinned_bytes_; }

  /// Notes a broken rule, or ends the program.
  void broken(const std::string& what);

  void note(const std::string& line) { log.push_back(line); }
  void note_host(c10::DeviceIndex index, const std::string& what);
  /// "compute" or "copy", in the log.
  static std::string name(StreamKey stream) { return stream.second == 0 ? "compute" : "copy"; }

  std::vector<std::string> log;
  int events = 0;
  int launches = 0;  // launches of graphs
  int kernels = 0;   // and copies, that streams were given
  std::optional<std::array<std::vector<HostUse>, kFakeDevices>> host_uses;
  std::optional<std::vector<std::string>> broken_rules;              // else one ends the program
  std::array<std::optional<int64_t>, kFakeDevices> kernels_left;     // until it fails
  std::optional<size_t> limit;                                       // limit of each index
  std::optional<int> pooled_streams;                                 // streams of each index
  bool refuses_ipc = false;                                          // see NoFakeIpc
  int stuck = 0;                                                     // see StuckFakeIpc
  std::array<size_t, kFakeDevices> used = {}, peak = {}, held = {};  // bytes

 private:
  /// Work that was given to a stream and is not done.
  struct Queue {
    std::deque<std::function<void()>> tasks;
    uint64_t given = 0;
    uint64_t done = 0;
    Clock clock;  // work that is done before the next task begins, but for the host's knowledge
  };
  /// The access of a task to a block.
  struct PastAccess {
    Access access;
    StreamKey stream;
    uint64_t position;
    std::string name;
  };
  struct Block {
    size_t bytes;
    StreamKey owner;
    std::set<StreamKey> users;  // recorded
    std::vector<PastAccess> past;
    std::shared_ptr<FakePool> pool = nullptr;  // pool of graphs, while it is used; else none
    std::set<StreamKey> writers = {};
  };

  struct StreamPool {
    std::vector<StreamKey> streams;
    size_t next = 0;
  };

  struct Pinned {
    size_t bytes;
    std::set<StreamKey> users;
  };
  using PinnedBlocks = std::map<const char*, Pinned>;

  PinnedBlocks::const_iterator find_pinned(const void* memory) const;
  /// Gives memory back, overwritten, when these streams have done their tasks until now.
  std::function<void()> overwrite_after(const std::set<StreamKey>& users, void* memory,
                                        size_t bytes);
  void run_until(StreamKey stream, uint64_t position);
  void finish(const Clock& clock);
  void merge(const Clock& clock, Clock& into) const;
  bool is_finished(StreamKey stream, uint64_t position) const;
  bool is_known(const PastAccess& past, const Clock& clock) const;
  void check_access(StreamKey stream, const Task& task, const Access& access);
  void check_free(Block& block);
  bool has_room(c10::DeviceIndex index, size_t bytes) const;
  void run_index(c10::DeviceIndex index);
  void refuse_captured(StreamKey stream) const;
  bool captures(c10::DeviceIndex index) const;
  bool has_failed(c10::DeviceIndex index) const { return kernels_left[index] == 0; }
  void refuse_failed(StreamKey stream, const Task& task) const;
  void* reserve(size_t bytes, c10::DeviceIndex index);
  void* allocate_captured(size_t bytes, StreamKey stream, FakeCapture& capture);
  void free_captured(char* memory, Block& block);

  std::map<StreamKey, Queue> queues_;
  std::map<StreamKey, FakeCapture> captures_;
  std::map<const char*, Block> blocks_;
  PinnedBlocks pinned_;
  size_t pinned_bytes_ = 0;  // also those that are freed and kept
  Clock finished_;           // finished work that the host knows of: it has waited
  c10::StreamId streams_ = 0;
  std::map<c10::DeviceIndex, StreamPool> pools_;
};

using FakeLock = std::lock_guard<std::recursive_mutex>;

/// Gives elements memory of at least so many bytes. libtorch would have the host copy them.
void grow(c10::StorageImpl& storage, size_t bytes);

/// The stream that is current on this thread.
StreamKey current_fake_stream(c10::DeviceIndex index);
/// The index that is current on this thread.
c10::DeviceIndex current_fake_index();

}  // namespace smp::testing
