// SPDX-License-Identifier: Apache-2.0
// Functions in place of those of libcudart.so.13 that libtorch calls. The parameters are CUDA's, of
// which pointers to its own types are void*. The error of a function that is missing here is that
// of the real library, which finds no driver.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/cuda/pretended/abi.h"
#include "tests/cuda/pretended/machine.h"

using namespace pretended;

namespace {

Machine& machine() { return Machine::get(); }

Stream* stream_of(void* handle) { return machine().stream_of(handle); }

Error launch(void* stream) { return machine().work(stream_of(stream), kLaunches); }

Error copy(void* to, const void* from, size_t bytes, void* stream) {
  return machine().copy(to, from, bytes, stream_of(stream));
}

/// A row of a table of numbers that cudaDeviceGetAttribute gives.
struct Attribute {
  int number;
  int value;
};
constexpr Attribute kAttributes[] = {
    {1, 1024},                              // threads of a block
    {5, 1 << 30},                           // blocks of a grid, in x, y and z
    {6, 65535},    {7, 65535}, {8, 49152},  // shared memory of a block
    {10, 32},                               // threads of a warp
    {12, 65536},                            // registers of a block
    {13, 1980000},                          // clock in kHz
    {16, 132},                              // processors
    {36, 2619000},                          // clock of the memory in kHz
    {37, 5120},                             // lines to the memory
    {39, 2048},                             // threads of a processor
    {75, 9},       {76, 0},                 // compute capability
    {81, 233472},                           // shared memory of a processor
    {97, 232448},                           // and of a block that asks for it
};

}  // namespace

// The device.

PRETENDED_API int cudaGetDeviceCount(int* count) {
  *count = 1;
  return kSuccess;
}

PRETENDED_API int cudaGetDevice(int* device) {
  *device = 0;
  return kSuccess;
}

PRETENDED_API int cudaSetDevice(int device) {
  const auto lock = Machine::lock();
  return device == 0 ? kSuccess : machine().fail(kInvalidDevice);
}

PRETENDED_API int cudaDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

PRETENDED_API int cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

PRETENDED_API int cudaDeviceGetAttribute(int* value, int number, int /*device*/) {
  *value = 1;
  for (const Attribute& attribute : kAttributes) {
    if (attribute.number == number) *value = attribute.value;
  }
  return kSuccess;
}

PRETENDED_API int cudaGetDeviceProperties(DeviceProperties* properties, int /*device*/) {
  const auto lock = Machine::lock();
  *properties = {};
  std::strcpy(properties->name, "Pretended H100");
  std::memcpy(properties->uuid, "pretended device", sizeof(properties->uuid));
  properties->memory = machine().total();
  properties->major = 9;
  properties->processors = 132;
  properties->warp = 32;
  properties->threads_per_block = 1024;
  properties->threads_per_processor = 2048;
  properties->blocks_per_processor = 32;
  properties->shared_per_block = 49152;
  properties->shared_per_block_by_choice = 232448;
  properties->shared_per_processor = 233472;
  properties->registers_per_block = properties->registers_per_processor = 65536;
  properties->l2_cache = 50 << 20;
  properties->texture_alignment = 512;
  const int blocks[] = {1024, 1024, 64}, grids[] = {1 << 30, 65535, 65535};
  std::memcpy(properties->block_sides, blocks, sizeof(blocks));
  std::memcpy(properties->grid_sides, grids, sizeof(grids));
  return kSuccess;
}

PRETENDED_API int cudaDeviceCanAccessPeer(int* can, int /*device*/, int /*peer*/) {
  *can = 0;
  return kSuccess;
}

PRETENDED_API int cudaDeviceGetPCIBusId(char* text, int size, int /*device*/) {
  std::snprintf(text, static_cast<size_t>(size), "0000:01:00.0");
  return kSuccess;
}

PRETENDED_API int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return kSuccess;
}

PRETENDED_API int cudaDeviceSynchronize() {
  const auto lock = Machine::lock();
  machine().count_wait();
  return machine().unsafe();
}

// Errors.

PRETENDED_API int cudaPeekAtLastError() { return this_thread.last; }

PRETENDED_API int cudaGetLastError() { return std::exchange(this_thread.last, kSuccess); }

PRETENDED_API const char* cudaGetErrorString(int error) {
  switch (error) {
    case kSuccess:
      return "no error";
    case kInvalidValue:
      return "invalid argument";
    case kMemoryAllocation:
      return "out of memory";
    case kInvalidDevice:
      return "invalid device ordinal";
    case kInvalidHandle:
      return "invalid resource handle";
    case kAssert:
      return "device-side assert triggered";
    case kNotSupported:
      return "operation not supported";
    case kCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case kCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case kCaptureMerge:
      return "operation would result in a merge of separate capture sequences";
    case kCaptureUnjoined:
      return "capturing stream has unjoined work";
    case kCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case kCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case kCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    case kCaptureWrongThread:
      return "attempt to terminate a thread-local capture sequence from another thread";
    default:
      return "an error of the pretended CUDA runtime";
  }
}

PRETENDED_API const char* cudaGetErrorName(int error) { return cudaGetErrorString(error); }

// Memory.

PRETENDED_API int cudaMalloc(void** address, size_t bytes) {
  const auto lock = Machine::lock();
  return machine().allocate(address, bytes);
}

PRETENDED_API int cudaFree(void* address) {
  const auto lock = Machine::lock();
  return machine().release(address);
}

PRETENDED_API int cudaMemGetInfo(size_t* free, size_t* total) {
  const auto lock = Machine::lock();
  if (const Error error = machine().broken()) return machine().fail(error);
  *total = machine().total();
  *free = *total - machine().used();
  return kSuccess;
}

PRETENDED_API int cudaHostRegister(void* address, size_t bytes, unsigned /*flags*/) {
  const auto lock = Machine::lock();
  if (const Error error = machine().unsafe()) return error;
  const bool added = machine().pinned.emplace(static_cast<const char*>(address), bytes).second;
  return added ? kSuccess : machine().fail(kAlreadyRegistered);
}

PRETENDED_API int cudaHostUnregister(void* address) {
  const auto lock = Machine::lock();
  const bool removed = machine().pinned.erase(static_cast<const char*>(address)) > 0;
  return removed ? kSuccess : machine().fail(kNotRegistered);
}

PRETENDED_API int cudaHostAlloc(void** address, size_t bytes, unsigned flags) {
  if (posix_memalign(address, 4096, bytes ? bytes : 1)) return kMemoryAllocation;
  const int error = cudaHostRegister(*address, bytes, flags);
  if (error) std::free(*address);
  return error;
}

PRETENDED_API int cudaFreeHost(void* address) {
  const int error = cudaHostUnregister(address);
  if (!error) std::free(address);
  return error;
}

PRETENDED_API int cudaPointerGetAttributes(PointerAttributes* attributes, const void* address) {
  const auto lock = Machine::lock();
  *attributes = {};
  const bool on_device = machine().has(address);
  attributes->type = on_device ? 2 : machine().is_pinned(address) ? 1 : 0;
  (on_device ? attributes->on_device : attributes->on_host) = const_cast<void*>(address);
  return kSuccess;
}

PRETENDED_API int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int /*kind*/,
                                  void* stream) {
  const auto lock = Machine::lock();
  return copy(to, from, bytes, stream);
}

PRETENDED_API int cudaMemcpyPeerAsync(void* to, int /*device*/, const void* from, int /*device*/,
                                      size_t bytes, void* stream) {
  const auto lock = Machine::lock();
  return copy(to, from, bytes, stream);
}

PRETENDED_API int cudaMemcpy(void* to, const void* from, size_t bytes, int /*kind*/) {
  const auto lock = Machine::lock();
  machine().count_wait();
  const Error error = machine().unsafe();
  return error ? error : copy(to, from, bytes, nullptr);
}

PRETENDED_API int cudaMemcpyToSymbol(const void* /*symbol*/, const void* /*from*/, size_t /*bytes*/,
                                     size_t /*offset*/, int /*kind*/) {
  return kSuccess;
}

PRETENDED_API int cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) {
  const auto lock = Machine::lock();
  const Error error = machine().work(stream_of(stream), kFills);
  if (!error && !machine().has(to)) std::memset(to, value, bytes);
  return error;
}

PRETENDED_API int cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

PRETENDED_API int cudaGetSymbolAddress(void** address, const void* /*symbol*/) {
  static void* const memory = [] {
    void* made = nullptr;
    cudaMalloc(&made, 4096);
    return made;
  }();
  *address = memory;
  return kSuccess;
}

// Streams and events.

PRETENDED_API int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  const auto lock = Machine::lock();
  auto made = std::make_unique<Stream>(Stream{/*blocking=*/flags == 0});
  *stream = made.get();
  machine().streams.emplace(*stream, std::move(made));
  return kSuccess;
}

PRETENDED_API int cudaStreamCreateWithPriority(void** stream, unsigned flags, int /*priority*/) {
  return cudaStreamCreateWithFlags(stream, flags);
}

PRETENDED_API int cudaStreamCreate(void** stream) { return cudaStreamCreateWithFlags(stream, 0); }

PRETENDED_API int cudaStreamDestroy(void* stream) {
  const auto lock = Machine::lock();
  const Error error = machine().query(stream_of(stream));  // a capture of it is spoilt
  machine().streams.erase(stream);
  return error;
}

PRETENDED_API int cudaStreamSynchronize(void* stream) {
  const auto lock = Machine::lock();
  machine().count_wait();
  return machine().query(stream_of(stream));
}

PRETENDED_API int cudaStreamQuery(void* stream) {
  const auto lock = Machine::lock();
  return machine().query(stream_of(stream));
}

PRETENDED_API int cudaStreamWaitEvent(void* stream, Event* event, unsigned /*flags*/) {
  const auto lock = Machine::lock();
  return machine().wait(stream_of(stream), *event);
}

PRETENDED_API int cudaStreamAddCallback(void* stream, void (*call)(void*, int, void*), void* data,
                                        unsigned /*flags*/) {
  call(stream, kSuccess, data);
  return kSuccess;
}

PRETENDED_API int cudaEventCreateWithFlags(Event** event, unsigned flags) {
  *event = new Event{flags};
  return kSuccess;
}

PRETENDED_API int cudaEventCreate(Event** event) { return cudaEventCreateWithFlags(event, 0); }

PRETENDED_API int cudaEventDestroy(Event* event) {
  const auto lock = Machine::lock();
  delete event;
  return kSuccess;
}

PRETENDED_API int cudaEventRecordWithFlags(Event* event, void* stream, unsigned /*flags*/) {
  const auto lock = Machine::lock();
  return machine().record(*event, stream_of(stream));
}

PRETENDED_API int cudaEventRecord(Event* event, void* stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

PRETENDED_API int cudaEventQuery(const Event* event) {
  const auto lock = Machine::lock();
  return machine().query(*event);
}

PRETENDED_API int cudaEventSynchronize(const Event* event) {
  const auto lock = Machine::lock();
  machine().count_wait();
  return machine().query(*event);
}

PRETENDED_API int cudaEventElapsedTime(float* milliseconds, const Event* /*start*/,
                                       const Event* /*end*/) {
  *milliseconds = 0.01F;
  return kSuccess;
}

// Captures and graphs.

PRETENDED_API int cudaThreadExchangeStreamCaptureMode(Mode* mode) {
  std::swap(*mode, this_thread.mode);
  return kSuccess;
}

PRETENDED_API int cudaStreamIsCapturing(void* stream, int* status) {
  const auto lock = Machine::lock();
  const Stream* found = stream_of(stream);
  if (!found) return machine().fail(kInvalidHandle);
  const Capture* capture = machine().capture_of(*found);
  *status = !capture ? 0 : capture->valid ? 1 : 2;  // none, active, invalidated
  return kSuccess;
}

PRETENDED_API int cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id,
                                           void** graph, const void** dependencies,
                                           const void** edges, size_t* count) {
  const auto lock = Machine::lock();
  if (const int error = cudaStreamIsCapturing(stream, status)) return error;
  if (id && *status) *id = machine().capture_of(*stream_of(stream))->id;
  for (const void** pointer : {const_cast<const void**>(graph), dependencies, edges}) {
    if (pointer) *pointer = nullptr;
  }
  if (count) *count = 0;
  return kSuccess;
}

PRETENDED_API int cudaStreamBeginCapture(void* stream, Mode mode) {
  const auto lock = Machine::lock();
  Stream* found = stream_of(stream);
  return found ? machine().begin(found, mode) : machine().fail(kInvalidHandle);
}

PRETENDED_API int cudaStreamEndCapture(void* stream, Graph** graph) {
  const auto lock = Machine::lock();
  Stream* found = stream_of(stream);
  return found ? machine().end(found, graph) : machine().fail(kInvalidHandle);
}

PRETENDED_API int cudaGraphGetNodes(const Graph* graph, void** /*nodes*/, size_t* count) {
  *count = graph->nodes;
  return kSuccess;
}

PRETENDED_API int cudaGraphInstantiateWithFlags(Graph** made, const Graph* graph,
                                                unsigned long long /*flags*/) {
  *made = new Graph(*graph);
  return kSuccess;
}

PRETENDED_API int cudaGraphLaunch(const Graph* /*graph*/, void* stream) {
  const auto lock = Machine::lock();
  return machine().work(stream_of(stream), kGraphLaunches);
}

PRETENDED_API int cudaGraphDestroy(const Graph* graph) {
  delete graph;
  return kSuccess;
}

PRETENDED_API int cudaGraphExecDestroy(const Graph* graph) { return cudaGraphDestroy(graph); }

// Kernels.

PRETENDED_API int cudaFuncGetAttributes(FunctionAttributes* attributes, const void* /*function*/) {
  *attributes = {};
  attributes->threads_per_block = 1024;
  attributes->registers = 32;
  attributes->ptx_version = attributes->binary_version = 90;
  return kSuccess;
}

PRETENDED_API int cudaFuncSetAttribute(const void* /*function*/, int /*number*/, int /*value*/) {
  return kSuccess;
}

PRETENDED_API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* count, const void* /*function*/, int /*threads*/, size_t /*shared*/, unsigned /*flags*/) {
  *count = 2;
  return kSuccess;
}

PRETENDED_API int __cudaLaunchKernel(void* /*kernel*/, Sides /*grid*/, Sides /*block*/,
                                     void** /*arguments*/, size_t /*shared*/, void* stream) {
  const auto lock = Machine::lock();
  return launch(stream);
}

PRETENDED_API int cudaLaunchKernelExC(const LaunchConfig* config, const void* /*function*/,
                                      void** /*arguments*/) {
  const auto lock = Machine::lock();
  return launch(config->stream);
}
