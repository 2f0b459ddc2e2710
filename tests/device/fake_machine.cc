// SPDX-License-Identifier: Apache-2.0
#include "tests/device/fake_machine.h"

#include <c10/util/Backtrace.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>

namespace smp::testing {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kFreed = 0xDD;

std::string text_of(StreamKey stream) {
  return c10::str("stream ", stream.second, " of fake:", static_cast<int>(stream.first));
}

void* aligned(size_t bytes) {
  return std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

bool overlap(const Access& a, const Access& b) { return a.begin < b.end && b.begin < a.end; }

/// A static object of libtorch's, which the first checked call of CUDA makes and all others read.
struct Registry {
  ~Registry() { is_gone = true; }
  static inline bool is_gone = false;
};

bool covers(const Access& a, const Access& b) {
  return a.begin <= b.begin && b.end <= a.end && (a.writes || !b.writes);
}

}  // namespace

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

FakeMachine& FakeMachine::get() {
  static auto* machine = new FakeMachine;  // tensors may outlive the program's end
  return *machine;
}

FakePool::~FakePool() {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().free(*this);
}

void FakeMachine::begin_capture(StreamKey stream, std::shared_ptr<FakePool> pool) {
  TORCH_CHECK(stream.second != 0, "the default stream cannot be captured");
  captures_[stream].pool = std::move(pool);
}

std::vector<Task> FakeMachine::end_capture(StreamKey stream) {
  std::vector<Task> tasks = std::move(captures_.at(stream).tasks);
  captures_.erase(stream);
  return tasks;
}

void FakeMachine::refuse_captured(StreamKey stream) const {
  TORCH_CHECK(!is_captured(stream), "operation not permitted when stream is capturing");
}

void FakeMachine::check_call() {
  static const Registry registry;
  if (Registry::is_gone) get().broken("the device is used when libtorch's registry of it is gone");
}

void FakeMachine::refuse_failed(StreamKey stream) const {
  check_call();
  if (!has_failed(stream.first)) return;
  constexpr int kDeviceAssert = 710;
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kDeviceAssert,
                              "fake error: device-side assert triggered");
}

/// Products are those of a library, which has errors of its own, as cuBLAS has.
void FakeMachine::refuse_failed(StreamKey stream, const Task& task) const {
  const bool is_product = task.name == "aten::mm" || task.name == "aten::addmm";
  TORCH_CHECK(!is_product || !has_failed(stream.first),
              "fake error: execution failed in a library");
  refuse_failed(stream);
}

void FakeMachine::give(StreamKey stream, Task task) {
  const auto capture = captures_.find(stream);
  if (capture != captures_.end()) {
    capture->second.tasks.push_back(std::move(task));
    return;
  }
  if (!task.accesses.empty()) {
    refuse_failed(stream, task);
    ++kernels;
    if (kernels_left[stream.first]) --*kernels_left[stream.first];
  }
  Queue& queue = queues_[stream];
  for (const Access& access : task.accesses) check_access(stream, task, access);
  if (task.accesses.empty()) {
    queue.tasks.push_back(std::move(task.run));
  } else {
    queue.tasks.push_back([this, index = stream.first, run = std::move(task.run)] {
      if (!has_failed(index)) run();
    });
  }
  ++queue.given;
}

void FakeMachine::run_until(StreamKey stream, uint64_t position) {
  Queue& queue = queues_[stream];
  while (queue.done < position && !queue.tasks.empty()) {
    const auto task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    ++queue.done;
    task();
  }
}

void FakeMachine::run_all(StreamKey stream) {
  refuse_captured(stream);
  run_until(stream, queues_[stream].given);
}

void FakeMachine::synchronize(StreamKey stream) {
  refuse_failed(stream);
  const Queue& queue = queues_[stream];
  if (finished_[stream] < queue.given) {
    finish(queue.clock);
    finished_[stream] = queue.given;
  }
  run_all(stream);
}

StreamKey FakeMachine::new_stream(c10::DeviceIndex index) { return {index, ++streams_}; }

StreamKey FakeMachine::pool_stream(c10::DeviceIndex index) {
  if (!pooled_streams) return new_stream(index);
  StreamPool& pool = pools_[index];
  const auto size = static_cast<size_t>(*pooled_streams);
  while (pool.streams.size() < size) pool.streams.push_back(new_stream(index));
  return pool.streams[pool.next++ % size];
}

void FakeMachine::record(FakeEvent*& event, StreamKey stream) {
  refuse_captured(stream);
  refuse_failed(stream);
  if (event == nullptr) event = new FakeEvent{events++, {}, 0, {}};
  const Queue& queue = queues_[stream];
  event->stream = stream;
  event->position = queue.given;
  event->clock.clear();
  merge(queue.clock, event->clock);
  event->clock[stream] = queue.given;
  note(c10::str(name(stream), " records event ", event->number));
}

void FakeMachine::block(const FakeEvent& event, StreamKey stream) {
  refuse_captured(stream);
  refuse_failed(stream);
  note(c10::str(name(stream), " waits for event ", event.number));
  give(stream, {"a wait", {}, [this, recorded = event.stream, position = event.position] {
                  run_until(recorded, position);
                }});
  Clock before;
  std::swap(before, queues_[stream].clock);  // without later progress
  merge(before, queues_[stream].clock);
  merge(event.clock, queues_[stream].clock);
}

bool FakeMachine::query(const FakeEvent& event) {
  refuse_failed(event.stream);
  const uint64_t done = queues_[event.stream].done;
  if (done < event.position) run_until(event.stream, done + 1);
  if (queues_[event.stream].done < event.position) return false;
  finish(event.clock);
  return true;
}

bool FakeMachine::query(StreamKey stream) {
  refuse_captured(stream);
  refuse_failed(stream);
  const Queue& queue = queues_[stream];
  run_until(stream, queue.done + 1);
  if (!queue.tasks.empty()) return false;
  synchronize(stream);
  return true;
}

void FakeMachine::synchronize(const FakeEvent& event) {
  refuse_failed(event.stream);
  note(c10::str("host waits for event ", event.number));
  note_host(event.stream.first, "waits for an event");
  finish(event.clock);
  run_until(event.stream, event.position);
}

void* FakeMachine::reserve(size_t bytes, c10::DeviceIndex index) {
  if (!has_room(index, bytes)) run_index(index);  // freed memory counts no more then
  TORCH_CHECK_WITH(OutOfMemoryError, has_room(index, bytes),
                   "fake out of memory. Tried to allocate ", bytes, " bytes. Device ",
                   static_cast<int>(index), " has ", limit.value_or(0), ", of which ", used[index],
                   " are allocated.");
  used[index] += bytes;
  peak[index] = std::max(peak[index], used[index]);
  held[index] = std::max(held[index], used[index]);
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(aligned(bytes)) | kOnDevice);
}

void* FakeMachine::allocate(size_t bytes, StreamKey stream) {
  const auto capture = captures_.find(stream);
  if (capture != captures_.end()) return allocate_captured(bytes, stream, capture->second);
  auto* memory = static_cast<char*>(reserve(bytes, stream.first));
  // The stream may not be done with its earlier memory there.
  const PastAccess before = {
      {memory, memory + bytes, true}, stream, queues_[stream].given, "what it had there before"};
  blocks_[memory] = {bytes, stream, {}, {before}};
  return memory;
}

/// The smallest free block of the pool that is large enough, or a new one.
void* FakeMachine::allocate_captured(size_t bytes, StreamKey stream, FakeCapture& capture) {
  char* best = nullptr;
  for (char* block : capture.pool->free) {
    const Block& found = blocks_.at(block);
    if (found.bytes < bytes) continue;
    if (best == nullptr || found.bytes < blocks_.at(best).bytes) best = block;
  }
  if (best != nullptr) {
    capture.pool->free.erase(best);
    blocks_.at(best).pool = capture.pool;
    return best;
  }
  auto* memory = static_cast<char*>(reserve(bytes, stream.first));
  blocks_[memory] = {bytes, stream, {}, {}, capture.pool};
  capture.pool->all.insert(memory);
  return memory;
}

/// The graph overwrites it each time it comes here, if it is captured just now.
void FakeMachine::free_captured(char* memory, Block& block) {
  const std::shared_ptr<FakePool> pool = std::exchange(block.pool, nullptr);
  pool->free.insert(memory);
  if (!is_captured(block.owner)) return;
  give(block.owner, {kRelease,
                     {{memory, memory + block.bytes, true}},
                     [memory = for_kernels(memory), bytes = block.bytes] {
                       std::memset(memory, kFreed, bytes);
                     }});
}

void FakeMachine::free(FakePool& pool) noexcept {
  for (char* memory : pool.all) {
    const auto found = blocks_.find(memory);
    const c10::DeviceIndex index = found->second.owner.first;
    run_index(index);
    used[index] -= found->second.bytes;
    blocks_.erase(found);
    std::free(for_kernels(memory));
  }
}

void FakeMachine::free(void* memory) noexcept {
  const auto found = blocks_.find(static_cast<char*>(memory));
  if (found->second.pool != nullptr) {
    free_captured(static_cast<char*>(memory), found->second);
    return;
  }
  Block block = std::move(found->second);
  blocks_.erase(found);
  check_free(block);
  const bool at_once = block.users.empty();  // the stream's next tasks may have it
  const c10::DeviceIndex index = block.owner.first;
  if (at_once) used[index] -= block.bytes;
  const auto release = [this, at_once, index, bytes = block.bytes,
                        overwrite = overwrite_after(block.users, memory, block.bytes)] {
    overwrite();
    if (!at_once) used[index] -= bytes;
  };
  if (at_once && queues_[block.owner].tasks.empty()) {
    release();
  } else {
    give(block.owner, {"a release", {}, release});
  }
}

std::function<void()> FakeMachine::overwrite_after(const std::set<StreamKey>& users, void* memory,
                                                   size_t bytes) {
  std::vector<std::pair<StreamKey, uint64_t>> waits;
  for (const StreamKey& user : users) waits.emplace_back(user, queues_[user].given);
  return [this, waits, memory, bytes] {
    for (const auto& [user, position] : waits) run_until(user, position);
    std::memset(for_kernels(memory), kFreed, bytes);
    std::free(for_kernels(memory));
  };
}

bool FakeMachine::captures(c10::DeviceIndex index) const {
  return std::any_of(captures_.begin(), captures_.end(),
                     [&](const auto& entry) { return entry.first.first == index; });
}

void FakeMachine::record_use(void* memory, StreamKey stream) {
  const auto found = blocks_.find(static_cast<char*>(memory));
  if (found == blocks_.end()) return;  // an empty tensor
  // libtorch takes a use that is recorded during a capture for one of the capture's, and forgets
  // it.
  if (stream != found->second.owner && !captures(stream.first)) found->second.users.insert(stream);
  note(c10::str(name(stream), " uses memory of another stream"));
}

void* FakeMachine::allocate_pinned(size_t bytes) {
  void* memory = aligned(bytes);
  pinned_[static_cast<char*>(memory)] = {bytes, {}};
  pinned_bytes_ += bytes;
  return memory;
}

void FakeMachine::free_pinned(void* memory) noexcept {
  const auto found = pinned_.find(static_cast<char*>(memory));
  const Pinned block = std::move(found->second);
  pinned_.erase(found);
  const auto release = [this, bytes = block.bytes,
                        overwrite = overwrite_after(block.users, memory, block.bytes)] {
    overwrite();
    pinned_bytes_ -= bytes;
  };
  if (block.users.empty()) {
    release();
  } else {
    give(*block.users.begin(), {"a release", {}, release});
  }
}

void FakeMachine::use_pinned(const void* memory, StreamKey stream) {
  const auto found = find_pinned(memory);
  if (found != pinned_.end()) pinned_[found->first].users.insert(stream);
}

FakeMachine::PinnedBlocks::const_iterator FakeMachine::find_pinned(const void* memory) const {
  const auto* at = static_cast<const char*>(memory);
  auto found = pinned_.upper_bound(at);
  if (found == pinned_.begin()) return pinned_.end();
  --found;
  return at < found->first + found->second.bytes ? found : pinned_.end();
}

void FakeMachine::note_host(c10::DeviceIndex index, const std::string& what) {
  if (host_uses) (*host_uses)[index].push_back({what, c10::get_backtrace(/*frames_to_skip=*/2)});
}

void FakeMachine::finish(const Clock& clock) {
  for (const auto& [stream, position] : clock) {
    uint64_t& known = finished_[stream];
    known = std::max(known, position);
  }
}

void FakeMachine::merge(const Clock& clock, Clock& into) const {
  for (const auto& [stream, position] : clock) {
    if (is_finished(stream, position)) continue;
    uint64_t& known = into[stream];
    known = std::max(known, position);
  }
}

bool FakeMachine::is_finished(StreamKey stream, uint64_t position) const {
  const auto known = finished_.find(stream);
  return position == 0 || (known != finished_.end() && known->second >= position);
}

bool FakeMachine::is_known(const PastAccess& past, const Clock& clock) const {
  const auto known = clock.find(past.stream);
  return is_finished(past.stream, past.position) ||
         (known != clock.end() && known->second >= past.position);
}

void FakeMachine::check_access(StreamKey stream, const Task& task, const Access& access) {
  auto found = blocks_.upper_bound(access.begin);
  if (found == blocks_.begin()) return;
  --found;
  if (access.begin >= found->first + found->second.bytes) return;  // no memory of the device's
  const Queue& queue = queues_[stream];
  auto& past = found->second.past;
  for (const PastAccess& before : past) {
    if (before.stream == stream || !overlap(before.access, access)) continue;
    if (!before.access.writes && !access.writes) continue;
    if (is_known(before, queue.clock)) continue;
    broken(c10::str(task.name, " on ", text_of(stream), access.writes ? " writes" : " reads",
                    " memory of ", found->second.bytes, " bytes and does not wait for ",
                    text_of(before.stream), ", which ", before.access.writes ? "writes" : "reads",
                    " it: ", before.name));
  }
  past.erase(std::remove_if(past.begin(), past.end(),
                            [&](const PastAccess& before) {
                              return is_finished(before.stream, before.position) ||
                                     (before.stream == stream && covers(access, before.access));
                            }),
             past.end());
  past.push_back({access, stream, queue.given + 1, task.name});
  if (access.writes) found->second.writers.insert(stream);
}

/// Keeps the memory for those that should have been recorded, too.
void FakeMachine::check_free(Block& block) {
  const Clock& known = queues_[block.owner].clock;
  for (const PastAccess& past : block.past) {
    if (past.stream == block.owner || block.users.count(past.stream) > 0) continue;
    if (is_known(past, known)) continue;
    block.users.insert(past.stream);
    // Events of an index that has failed are of no use to the library, and its streams do nothing.
    if (has_failed(block.owner.first) || has_failed(past.stream.first)) continue;
    broken(c10::str("memory of ", block.bytes, " bytes, allocated on ", text_of(block.owner),
                    ", is freed while ", text_of(past.stream), " may use it (", past.name,
                    "): record that use, recordDataPtrOnStream"));
  }
}

void FakeMachine::remove_block(char* memory) {
  const auto found = blocks_.find(memory);
  for (const PastAccess& past : std::exchange(found->second.past, {})) {
    run_until(past.stream, past.position);
  }
  blocks_.erase(found);
}

void FakeMachine::check_close(const char* memory) {
  const Block& block = blocks_.at(memory);
  for (const PastAccess& past : block.past) {
    if (block.writers.count(past.stream) > 0 || is_finished(past.stream, past.position)) continue;
    if (has_failed(past.stream.first)) continue;
    broken(c10::str("memory of another process is closed while ", text_of(past.stream),
                    " may read it"));
  }
}

void FakeMachine::broken(const std::string& what) {
  if (broken_rules) {
    broken_rules->push_back(what);
    return;
  }
  std::cerr << "the fake device: " << what << "\n" << c10::get_backtrace() << std::endl;
  std::abort();
}

bool FakeMachine::has_room(c10::DeviceIndex index, size_t bytes) const {
  return !limit || used[index] + bytes <= *limit;
}

void FakeMachine::mend(c10::DeviceIndex index) {
  run_index(index);
  kernels_left[index].reset();
}

void FakeMachine::run_index(c10::DeviceIndex index) {
  std::vector<StreamKey> streams;
  for (const auto& [stream, queue] : queues_) {
    if (stream.first == index && !is_captured(stream)) streams.push_back(stream);
  }
  for (const StreamKey& stream : streams) run_all(stream);
}

}  // namespace smp::testing
