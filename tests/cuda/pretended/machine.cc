// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda/pretended/machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>

namespace pretended {
namespace {

constexpr size_t kPage = 4096;

constexpr const char* kNames[kCounts] = {
    "launches",         "graph_launches", "captured_nodes", "copies_to_device", "copies_to_host",
    "copies_on_device", "fills",          "waits",          "allocations"};

size_t number_in(const char* variable, size_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

/// Whether an address lies in one of the ranges, which have their sizes by where they begin.
bool is_in(const std::map<const char*, size_t>& ranges, const void* address) {
  const auto* at = static_cast<const char*>(address);
  const auto next = ranges.upper_bound(at);
  return next != ranges.begin() && at < std::prev(next)->first + std::prev(next)->second;
}

void read(const void* from, size_t bytes) {
  const auto* at = static_cast<const volatile char*>(from);
  for (size_t i = 0; i < bytes; i += kPage) static_cast<void>(at[i]);
}

void add(Before& to, const Before& more) {
  for (const auto& [stream, nodes] : more) to[stream] = std::max(to[stream], nodes);
}

bool covers(const Before& all, const Before& some) {
  for (const auto& [stream, nodes] : some) {
    const auto found = all.find(stream);
    if (nodes > 0 && (found == all.end() || found->second < nodes)) return false;
  }
  return true;
}

/// Writes them into the file that the environment names; each rank of a job has one of its own.
__attribute__((destructor)) void write_counts() {
  const char *path = std::getenv("PRETENDED_CUDA_COUNTS"), *rank = std::getenv("RANK");
  if (!path) return;
  FILE* file = std::fopen((std::string(path) + "." + (rank ? rank : "0")).c_str(), "w");
  if (!file) return;
  for (size_t i = 0; i < kCounts; ++i) {
    std::fprintf(file, "%s %zu\n", kNames[i], Machine::get().count(static_cast<Count>(i)));
  }
  std::fclose(file);
}

}  // namespace

thread_local Thread this_thread;

Machine& Machine::get() {
  static Machine& machine = *new Machine;
  return machine;
}

std::lock_guard<std::recursive_mutex> Machine::lock() {
  static std::recursive_mutex& mutex = *new std::recursive_mutex;
  return std::lock_guard<std::recursive_mutex>(mutex);
}

Machine::Machine()
    : fail_at(number_in("PRETENDED_CUDA_FAIL_AFTER", SIZE_MAX)),
      total_(number_in("PRETENDED_CUDA_MIB", size_t{80} << 10) << 20) {}

Error Machine::fail(Error error) {
  if (error) this_thread.last = error;
  return error;
}

bool Machine::has(const void* address) const { return is_in(allocations_, address); }

bool Machine::is_pinned(const void* address) const { return is_in(pinned, address); }

Error Machine::map(void** address, size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return fail(kMemoryAllocation);
  allocations_[static_cast<const char*>(found)] = bytes;
  *address = found;
  return kSuccess;
}

Error Machine::allocate(void** address, size_t bytes) {
  ++counts_[kAllocations];
  *address = nullptr;
  if (const Error error = unsafe()) return error;
  bytes = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  if (used_ + bytes > total_) return fail(kMemoryAllocation);
  if (const Error error = map(address, bytes)) return error;
  used_ += bytes;
  return kSuccess;
}

Error Machine::release(void* address) {
  if (!address) return kSuccess;
  if (const Error error = unsafe()) return error;
  const size_t bytes = size_of(address);
  if (bytes == 0) return fail(kInvalidValue);
  forget_shared(address);
  munmap(address, bytes);
  used_ -= bytes;
  allocations_.erase(static_cast<const char*>(address));
  return kSuccess;
}

Error Machine::open(void** address, size_t bytes) {
  if (const Error error = unsafe()) return error;
  if (const Error error = map(address, bytes)) return error;
  opened_.insert(static_cast<const char*>(*address));
  return kSuccess;
}

Error Machine::close(void* address) {
  const auto found = allocations_.find(static_cast<const char*>(address));
  if (!opened_.erase(static_cast<const char*>(address))) return fail(kInvalidValue);
  munmap(address, found->second);
  allocations_.erase(found);
  return kSuccess;
}

size_t Machine::size_of(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  const auto found = allocations_.find(at);
  return found == allocations_.end() || opened_.count(at) ? 0 : found->second;
}

Error Machine::copy(void* to, const void* from, size_t bytes, Stream* stream) {
  const bool to_device = has(to), from_device = has(from);
  const Count kind = !to_device ? kCopiesToHost : from_device ? kCopiesOnDevice : kCopiesToDevice;
  if (const Error error = work(stream, kind)) return error;
  if (capture_of(*stream)) return kSuccess;
  if (to_device && !from_device) read(from, bytes);
  void* const result = to_device ? shared_bytes(to) : to;
  const void* const source = from_device ? shared_bytes(from) : from;
  if (result && source) std::memmove(result, source, bytes);
  if (result && !source) std::memset(result, 0, bytes);
  return kSuccess;
}

Capture* Machine::capture_of(const Stream& stream) const {
  return captures_.count(stream.capture) ? stream.capture.get() : nullptr;
}

Capture* Machine::capture_of(const Event& event) const {
  return captures_.count(event.capture) ? event.capture.get() : nullptr;
}

Error Machine::begin(Stream* stream, Mode mode) {
  if (stream == &default_ || capture_of(*stream)) return fail(kCaptureUnsupported);
  stream->capture =
      std::make_shared<Capture>(Capture{++ids_, mode, stream, std::this_thread::get_id()});
  stream->before.clear();
  captures_.insert(stream->capture);
  return kSuccess;
}

Error Machine::end(Stream* stream, Graph** graph) {
  *graph = nullptr;
  const CapturePtr capture = stream->capture;
  if (!capture_of(*stream) || capture->origin != stream) return fail(kIllegalState);
  if (capture->thread != std::this_thread::get_id() && capture->mode != Mode::kRelaxed) {
    capture->valid = false;
    return fail(kCaptureWrongThread);
  }
  captures_.erase(capture);
  if (!capture->valid) return fail(kCaptureInvalidated);
  if (!covers(stream->before, capture->last)) return fail(kCaptureUnjoined);
  *graph = new Graph{capture->nodes};
  return kSuccess;
}

Error Machine::unsafe() {
  if (const Error error = broken()) return fail(error);
  if (this_thread.mode == Mode::kRelaxed) return kSuccess;
  bool disturbs = false;
  for (const CapturePtr& capture : captures_) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool all = this_thread.mode == Mode::kGlobal && capture->mode == Mode::kGlobal;
    if (own ? capture->mode != Mode::kRelaxed : all) {
      capture->valid = false;
      disturbs = true;
    }
  }
  return disturbs ? fail(kCaptureUnsupported) : kSuccess;
}

Error Machine::work(Stream* stream, Count kind) {
  if (!stream) return fail(kInvalidHandle);
  Capture* const captured_by = capture_of(*stream);
  if (!captured_by) ++counts_[kind];
  if (const Error error = broken()) return fail(error);
  if (captured_by) return add_node(*captured_by, stream);
  if (stream != &default_) return kSuccess;
  for (const CapturePtr& capture : captures_) {  // which would have to wait for the default stream
    if (capture->origin->blocking) {
      capture->valid = false;
      return fail(kCaptureImplicit);
    }
  }
  return kSuccess;
}

Error Machine::add_node(Capture& capture, Stream* stream) {
  if (!capture.valid) return fail(kCaptureInvalidated);
  ++counts_[kCapturedNodes];
  ++capture.nodes;
  stream->before[stream] = ++capture.last[stream];
  return kSuccess;
}

Error Machine::query(const Stream* stream) {
  if (const Error error = broken()) return fail(error);
  if (!stream) return fail(kInvalidHandle);
  Capture* capture = capture_of(*stream);
  if (!capture) return kSuccess;
  capture->valid = false;
  return fail(kCaptureUnsupported);
}

Error Machine::query(const Event& event) {
  if (Capture* capture = capture_of(event)) {
    capture->valid = false;
    return fail(kCapturedEvent);
  }
  return unsafe();
}

Error Machine::record(Event& event, Stream* stream) {
  if (!stream) return fail(kInvalidHandle);
  if (const Error error = broken()) return fail(error);
  event.recorded = true;
  event.capture = capture_of(*stream) ? stream->capture : nullptr;
  event.before = event.capture ? stream->before : Before{};
  return event.capture && !event.capture->valid ? fail(kCaptureInvalidated) : kSuccess;
}

Error Machine::wait(Stream* stream, const Event& event) {
  if (!stream) return fail(kInvalidHandle);
  if (const Error error = broken()) return fail(error);
  Capture *into = capture_of(*stream), *from = capture_of(event);
  if (!event.recorded || (!into && !from)) return kSuccess;
  if (into && into != from) {
    into->valid = false;
    if (from) from->valid = false;
    return fail(from ? kCaptureMerge : kCaptureIsolation);
  }
  if (!into) {
    stream->capture = event.capture;
    stream->before.clear();
  }
  add(stream->before, event.before);
  return kSuccess;
}

Stream* Machine::stream_of(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return &default_;
  const auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second.get();
}

}  // namespace pretended

using pretended::Machine;

long pretended_cuda_count(const char* name) {
  const auto lock = Machine::lock();
  for (size_t i = 0; i < pretended::kCounts; ++i) {
    if (!std::strcmp(pretended::kNames[i], name)) {
      return static_cast<long>(Machine::get().count(static_cast<pretended::Count>(i)));
    }
  }
  return -1;
}

void pretended_cuda_fail_after(size_t launches) {
  const auto lock = Machine::lock();
  Machine& machine = Machine::get();
  machine.fail_at = machine.count(pretended::kLaunches) + launches;
}
