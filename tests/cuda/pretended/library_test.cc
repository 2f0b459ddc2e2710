// SPDX-License-Identifier: Apache-2.0
// The pretended CUDA runtime by itself, without libtorch: memory, captures by CUDA's rules, counts,
// a device that fails.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/cuda/pretended/abi.h"

namespace {

using pretended::Sides;

// Errors and capture modes of CUDA.
constexpr int kOutOfMemory = 2, kInvalidHandle = 400, kAssert = 710, kNotSupported = 801,
              kUnsupported = 900, kInvalidated = 901, kMerge = 902, kUnjoined = 904,
              kIsolation = 905, kImplicit = 906, kCapturedEvent = 907, kWrongThread = 908;
constexpr int kGlobal = 0, kThreadLocal = 1, kRelaxed = 2;

void* library() {
  static void* const opened = dlopen("tests/cuda/pretended/libcuda.so.1", RTLD_NOW);
  return opened;
}

/// Calls a function of the library; the arguments have the types of its parameters.
template <class... Parameters>
int call(const char* name, Parameters... parameters) {
  const auto function = reinterpret_cast<int (*)(Parameters...)>(dlsym(library(), name));
  if (function) return function(parameters...);
  ADD_FAILURE() << "the library has no " << name << ": " << dlerror();
  return -1;
}

long count(const char* what) {
  return reinterpret_cast<long (*)(const char*)>(dlsym(library(), "pretended_cuda_count"))(what);
}

int launch(void* stream) {
  const Sides one = {1, 1, 1};
  return call("__cudaLaunchKernel", static_cast<void*>(nullptr), one, one,
              static_cast<void**>(nullptr), size_t{0}, stream);
}

int allocate(void** address, size_t bytes) { return call("cudaMalloc", address, bytes); }

int copy(void* to, const void* from, size_t bytes, void* stream) {
  return call("cudaMemcpyAsync", to, from, bytes, /*kind=*/4, stream);
}

/// A stream that the default stream does not wait for, unless it is made with other flags.
void* make_stream(unsigned flags = 1) {
  void* stream = nullptr;
  EXPECT_EQ(call("cudaStreamCreateWithFlags", &stream, flags), 0);
  return stream;
}

void* make_event() {
  void* event = nullptr;
  EXPECT_EQ(call("cudaEventCreateWithFlags", &event, 0U), 0);
  return event;
}

int record(void* event, void* stream) { return call("cudaEventRecord", event, stream); }

int wait(void* stream, void* event) { return call("cudaStreamWaitEvent", stream, event, 0U); }

int begin(void* stream, int mode = kThreadLocal) {
  return call("cudaStreamBeginCapture", stream, mode);
}

int end(void* stream, void** graph) { return call("cudaStreamEndCapture", stream, graph); }

/// Ends the capture of a stream, and expects a graph unless that fails.
int end_of(void* stream) {
  void* graph = nullptr;
  const int error = end(stream, &graph);
  EXPECT_EQ(graph != nullptr, error == 0);
  return error;
}

TEST(PretendedLibrary, IsTheDriverForWhateverLooksForOne) {
  ASSERT_NE(library(), nullptr) << dlerror();
  EXPECT_EQ(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), library());
}

TEST(PretendedMemory, TheHostCannotTouchIt) {
  void* memory = nullptr;
  ASSERT_EQ(allocate(&memory, 100), 0);
  auto* const bytes = static_cast<volatile char*>(memory);
  EXPECT_EXIT(bytes[99] = 1, ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(std::exit(bytes[0]), ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EQ(call("cudaFree", memory), 0);
  EXPECT_EXIT(std::exit(bytes[0]), ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EQ(call("cudaFree", memory), 1) << "it was freed";
}

/// Kernels that are compiled while a program runs.
TEST(PretendedDriver, LoadsModulesAndCountsTheirLaunches) {
  void *module = nullptr, *kernel = nullptr, *none = nullptr, *stream = make_stream();
  ASSERT_EQ(call("cuModuleLoadData", &module, none), 0);
  ASSERT_EQ(call("cuModuleGetFunction", &kernel, module, "name"), 0);
  EXPECT_NE(kernel, nullptr);
  const long before = count("launches");
  EXPECT_EQ(call("cuLaunchKernel", kernel, 1U, 1U, 1U, 1U, 1U, 1U, 0U, stream, none, none), 0);
  EXPECT_EQ(count("launches"), before + 1);
  ASSERT_EQ(begin(stream), 0);
  EXPECT_EQ(call("cuModuleLoadData", &module, none), kUnsupported) << "it takes memory";
  EXPECT_EQ(end_of(stream), kInvalidated);
}

TEST(PretendedMemory, HoldsNothingAndHasAnEnd) {
  size_t before = 0, free = 0, total = 0;
  ASSERT_EQ(call("cudaMemGetInfo", &before, &total), 0);
  void* memory = nullptr;
  ASSERT_EQ(allocate(&memory, 1 << 20), 0);
  std::string text = "text";
  EXPECT_EQ(copy(memory, text.data(), 4, nullptr), 0);
  EXPECT_EQ(copy(text.data(), memory, 4, nullptr), 0);
  EXPECT_EQ(text, std::string(4, '\0'));
  EXPECT_EQ(call("cudaMemGetInfo", &free, &total), 0);
  EXPECT_EQ(before - free, size_t{1} << 20);
  void* more = nullptr;
  EXPECT_EQ(allocate(&more, free + 1), kOutOfMemory);
  EXPECT_EQ(call("cudaGetLastError"), kOutOfMemory);
  EXPECT_EQ(call("cudaGetLastError"), 0);
  EXPECT_EQ(call("cudaFree", memory), 0);
}

TEST(PretendedMemory, IsKnownByItsAddress) {
  void *memory = nullptr, *pinned = nullptr;
  ASSERT_EQ(allocate(&memory, 100), 0);
  ASSERT_EQ(call("cudaHostAlloc", &pinned, size_t{100}, 0U), 0);
  const auto type_of = [](const void* address) {
    pretended::PointerAttributes attributes;
    EXPECT_EQ(call("cudaPointerGetAttributes", &attributes, address), 0);
    return attributes.type;
  };
  EXPECT_EQ(type_of(static_cast<char*>(memory) + 99), 2);
  EXPECT_EQ(type_of(static_cast<char*>(pinned) + 99), 1);
  EXPECT_EQ(type_of(&memory), 0);
  EXPECT_EQ(call("cudaFreeHost", pinned), 0);
  EXPECT_EQ(call("cudaFree", memory), 0);
}

/// Runs `body` in another process, which may open what this one has made.
pid_t start(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  return child;
}

bool ended_well(pid_t child) {
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

/// A cudaIpcMemHandle_t or a cudaIpcEventHandle_t.
struct Handle {
  char bytes[64];
};

TEST(PretendedIpc, MemoryIsOfTheProcessThatMadeItUntilOthersHaveClosedIt) {
  void *memory = nullptr, *own = nullptr;
  Handle handle;
  ASSERT_EQ(allocate(&memory, 100), 0);
  ASSERT_EQ(call("cudaIpcGetMemHandle", &handle, memory), 0);
  EXPECT_EQ(call("cudaIpcOpenMemHandle", &own, handle, 1U), kInvalidHandle) << "as CUDA says";
  int opened[2], closes[2];
  ASSERT_EQ(pipe(opened) + pipe(closes), 0);
  char byte = 0;
  const pid_t child = start([&] {
    void* other = nullptr;
    pretended::PointerAttributes attributes;
    const bool is_open = call("cudaIpcOpenMemHandle", &other, handle, 1U) == 0 &&
                         call("cudaPointerGetAttributes", &attributes, other) == 0 &&
                         attributes.type == 2 && call("cudaFree", other) == 1;
    return write(opened[1], &byte, 1) == 1 && read(closes[0], &byte, 1) == 1 && is_open &&
           call("cudaIpcCloseMemHandle", other) == 0 && call("cudaIpcCloseMemHandle", other) == 1;
  });
  ASSERT_EQ(read(opened[0], &byte, 1), 1);
  EXPECT_DEATH(call("cudaFree", memory), "memory is freed that another process has open");
  ASSERT_EQ(write(closes[1], &byte, 1), 1);
  EXPECT_TRUE(ended_well(child));
  EXPECT_EQ(call("cudaFree", memory), 0);
}

TEST(PretendedIpc, MemoryHoldsWhatIsCopiedThere) {
  void *memory = nullptr, *unshared = nullptr;
  Handle handle;
  ASSERT_EQ(allocate(&memory, 100) + allocate(&unshared, 100), 0);
  ASSERT_EQ(call("cudaIpcGetMemHandle", &handle, memory), 0);
  const auto copy_one = [](void* to, const void* from) {
    return copy(to, from, sizeof(int), nullptr);
  };
  const auto at = [](void* address, int place) { return static_cast<int*>(address) + place; };
  const int written[] = {5, 6};
  int read[] = {1, 1, 1};
  ASSERT_EQ(copy_one(at(memory, 1), &written[0]), 0);
  EXPECT_TRUE(ended_well(start([&] {
    void* other = nullptr;
    return call("cudaIpcOpenMemHandle", &other, handle, 1U) == 0 &&
           copy_one(read, at(other, 1)) == 0 && read[0] == 5 &&
           copy_one(at(other, 2), at(other, 1)) == 0 && call("cudaIpcCloseMemHandle", other) == 0;
  })));
  ASSERT_EQ(copy_one(unshared, &written[1]), 0);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(copy_one(&read[i], at(memory, 2 * i)), 0);
  ASSERT_EQ(copy_one(&read[2], unshared), 0);
  EXPECT_EQ(std::vector<int>(read, read + 3), std::vector<int>({0, 5, 0}));
  ASSERT_EQ(copy_one(at(memory, 2), unshared), 0);
  ASSERT_EQ(copy_one(&read[1], at(memory, 2)), 0);
  EXPECT_EQ(read[1], 0);
  EXPECT_EQ(call("cudaFree", memory) + call("cudaFree", unshared), 0);
}

TEST(PretendedIpc, EventsAreMadeForIt) {
  Handle handle;
  EXPECT_EQ(call("cudaIpcGetEventHandle", &handle, make_event()), kInvalidHandle);
  void* event = nullptr;
  ASSERT_EQ(call("cudaEventCreateWithFlags", &event, 6U), 0);
  ASSERT_EQ(call("cudaIpcGetEventHandle", &handle, event), 0);
  EXPECT_EQ(call("cudaIpcOpenEventHandle", &event, handle), kInvalidHandle) << "its own";
  EXPECT_TRUE(ended_well(start([&] {
    void* other = nullptr;
    return call("cudaIpcOpenEventHandle", &other, handle) == 0 && wait(make_stream(), other) == 0;
  })));
}

TEST(PretendedIpc, CanBeLeftOut) {
  void* memory = nullptr;
  Handle handle;
  ASSERT_EQ(allocate(&memory, 100), 0);
  setenv("PRETENDED_CUDA_NO_IPC", "1", 1);
  EXPECT_EQ(call("cudaIpcGetMemHandle", &handle, memory), kNotSupported);
  unsetenv("PRETENDED_CUDA_NO_IPC");
}

TEST(PretendedCounts, OfLaunchesCopiesAndWaits) {
  void *memory = nullptr, *stream = make_stream(), *event = make_event();
  ASSERT_EQ(allocate(&memory, 100), 0);
  const char* const names[] = {
      "launches", "copies_to_device", "copies_to_host", "copies_on_device", "fills", "waits"};
  long before[6];
  for (int i = 0; i < 6; ++i) before[i] = count(names[i]);
  char byte = 0;
  for (int i = 0; i < 3; ++i) launch(stream);
  copy(memory, &byte, 1, stream);
  copy(&byte, memory, 1, stream);
  copy(memory, memory, 1, stream);
  call("cudaMemsetAsync", memory, 0, size_t{100}, stream);
  record(event, stream);
  call("cudaEventSynchronize", event);
  call("cudaStreamSynchronize", stream);
  call("cudaEventQuery", event);  // the host does not wait
  const long expected[] = {3, 1, 1, 1, 1, 2};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(count(names[i]) - before[i], expected[i]) << names[i];
  EXPECT_EQ(count("no such name"), -1);
}

TEST(PretendedCapture, TakesWorkAndLaunchesItLater) {
  void *stream = make_stream(), *graph = nullptr, *made = nullptr;
  ASSERT_EQ(begin(stream), 0);
  const long launches = count("launches");
  EXPECT_EQ(launch(stream), 0);
  EXPECT_EQ(launch(stream), 0);
  EXPECT_EQ(count("launches"), launches);
  ASSERT_EQ(end(stream, &graph), 0);
  size_t nodes = 0;
  EXPECT_EQ(call("cudaGraphGetNodes", graph, static_cast<void**>(nullptr), &nodes), 0);
  EXPECT_EQ(nodes, 2U);
  ASSERT_EQ(call("cudaGraphInstantiateWithFlags", &made, graph, 0ULL), 0);
  const long before = count("graph_launches");
  EXPECT_EQ(call("cudaGraphLaunch", made, stream), 0);
  EXPECT_EQ(count("graph_launches"), before + 1);
}

TEST(PretendedCapture, IsSpoiltByCallsThatItMustNotSee) {
  void *stream = make_stream(), *memory = nullptr;
  ASSERT_EQ(begin(stream), 0);
  EXPECT_EQ(allocate(&memory, 1), kUnsupported);
  EXPECT_EQ(launch(stream), kInvalidated);
  EXPECT_EQ(end_of(stream), kInvalidated);
  ASSERT_EQ(begin(stream), 0);
  EXPECT_EQ(call("cudaStreamSynchronize", stream), kUnsupported);
  EXPECT_EQ(end_of(stream), kInvalidated);
  EXPECT_EQ(allocate(&memory, 1), 0) << "all goes on";
}

TEST(PretendedCapture, ThreadsMayAllocateByTheModes) {
  const auto allocate_elsewhere = [](int mode) {
    int error = -1;
    std::thread([&] {
      int own = mode;
      void* memory = nullptr;
      call("cudaThreadExchangeStreamCaptureMode", &own);
      error = allocate(&memory, 1);
    }).join();
    return error;
  };
  void* stream = make_stream();
  ASSERT_EQ(begin(stream, kThreadLocal), 0);
  EXPECT_EQ(allocate_elsewhere(kGlobal), 0);
  int mode = kRelaxed;
  void* memory = nullptr;
  EXPECT_EQ(call("cudaThreadExchangeStreamCaptureMode", &mode), 0);
  EXPECT_EQ(mode, kGlobal);
  EXPECT_EQ(allocate(&memory, 1), 0) << "as libtorch's allocator does";
  EXPECT_EQ(call("cudaThreadExchangeStreamCaptureMode", &mode), 0);
  EXPECT_EQ(end_of(stream), 0);
  ASSERT_EQ(begin(stream, kGlobal), 0);
  EXPECT_EQ(allocate_elsewhere(kThreadLocal), 0);
  EXPECT_EQ(allocate_elsewhere(kGlobal), kUnsupported);
  EXPECT_EQ(end_of(stream), kInvalidated);
}

TEST(PretendedCapture, TakesOtherStreamsAlongAndWantsThemBack) {
  void *stream = make_stream(), *other = make_stream(), *event = make_event();
  for (const bool joined : {true, false}) {
    ASSERT_EQ(begin(stream), 0);
    EXPECT_EQ(record(event, stream), 0);
    EXPECT_EQ(wait(other, event), 0);
    EXPECT_EQ(launch(other), 0);
    if (joined) {
      EXPECT_EQ(record(event, other), 0);
      EXPECT_EQ(wait(stream, event), 0);
    }
    EXPECT_EQ(end_of(stream), joined ? 0 : kUnjoined);
  }
}

TEST(PretendedCapture, DoesNotWaitForWhatItDoesNotTake) {
  void *stream = make_stream(), *outside = make_stream(), *event = make_event();
  ASSERT_EQ(record(event, outside), 0);
  ASSERT_EQ(begin(stream), 0);
  EXPECT_EQ(wait(stream, event), kIsolation);
  EXPECT_EQ(end_of(stream), kInvalidated);
  ASSERT_EQ(begin(stream), 0);
  ASSERT_EQ(record(event, stream), 0);
  EXPECT_EQ(call("cudaEventSynchronize", event), kCapturedEvent);
  EXPECT_EQ(end_of(stream), kInvalidated);
  ASSERT_EQ(begin(stream), 0);
  ASSERT_EQ(begin(outside), 0);
  ASSERT_EQ(record(event, stream), 0);
  EXPECT_EQ(wait(outside, event), kMerge) << "another capture's";
  EXPECT_EQ(end_of(stream), kInvalidated);
  EXPECT_EQ(end_of(outside), kInvalidated);
}

TEST(PretendedCapture, IsOfAStreamThatTheDefaultOneLeavesAlone) {
  EXPECT_EQ(begin(nullptr), kUnsupported);
  void *apart = make_stream(), *blocking = make_stream(/*flags=*/0);
  ASSERT_EQ(begin(apart), 0);
  EXPECT_EQ(launch(nullptr), 0);
  EXPECT_EQ(end_of(apart), 0);
  ASSERT_EQ(begin(blocking), 0);
  EXPECT_EQ(launch(nullptr), kImplicit);
  EXPECT_EQ(end_of(blocking), kInvalidated);
}

TEST(PretendedCapture, EndsOnItsThread) {
  void* stream = make_stream();
  ASSERT_EQ(begin(stream), 0);
  int elsewhere = 0;
  std::thread([&] { elsewhere = end_of(stream); }).join();
  EXPECT_EQ(elsewhere, kWrongThread);
  EXPECT_EQ(end_of(stream), kInvalidated);
}

/// The library takes the costs of operators from these numbers.
TEST(PretendedDevice, HasTheProcessorsAndClocksOfAnH100) {
  const auto attribute = [](int number) {
    int value = 0;
    EXPECT_EQ(call("cudaDeviceGetAttribute", &value, number, 0), 0);
    return value;
  };
  constexpr int kClock = 13, kProcessors = 16, kMemoryClock = 36, kLines = 37;
  EXPECT_EQ(attribute(kProcessors), 132);
  EXPECT_EQ(attribute(kClock), 1980000);
  EXPECT_NEAR(2e3 * attribute(kMemoryClock) * attribute(kLines) / 8, 3.35e12, 1e10);
}

/// Exits with the number of the first failure, 0 for none.
[[noreturn]] void fail_for_good() {
  void* memory = nullptr;
  size_t bytes = 0;
  reinterpret_cast<void (*)(size_t)>(dlsym(library(), "pretended_cuda_fail_after"))(2);
  const int results[] = {launch(nullptr) == 0,
                         launch(nullptr) == 0,
                         launch(nullptr) == kAssert,
                         allocate(&memory, 1) == kAssert,
                         copy(&memory, &memory, 1, nullptr) == kAssert,
                         call("cudaDeviceSynchronize") == kAssert,
                         call("cudaMemGetInfo", &bytes, &bytes) == kAssert,
                         call("cudaGetLastError") == kAssert};
  int number = 0;
  for (const int result : results) {
    ++number;
    if (!result) std::exit(number);
  }
  std::exit(0);
}

TEST(PretendedDevice, FailsForGoodAtTheChosenKernel) {
  EXPECT_EXIT(fail_for_good(), ::testing::ExitedWithCode(0), "");
}

TEST(PretendedLibraries, CountProductsOnTheirStream) {
  void *handle = nullptr, *stream = make_stream();
  ASSERT_EQ(call("cublasCreate_v2", &handle), 0);
  ASSERT_EQ(call("cublasSetStream_v2", handle, stream), 0);
  const long launches = count("launches"), nodes = count("captured_nodes");
  EXPECT_EQ(call("cublasSgemm_v2", handle), 0);
  ASSERT_EQ(begin(stream), 0);
  EXPECT_EQ(call("cublasSgemm_v2", handle), 0);
  EXPECT_EQ(end_of(stream), 0);
  EXPECT_EQ(count("launches"), launches + 1);
  EXPECT_EQ(count("captured_nodes"), nodes + 1);
}

TEST(PretendedLibraries, CudnnsDescriptorsHaveWhatWasSet) {
  void* descriptor = nullptr;
  ASSERT_EQ(call("cudnnBackendCreateDescriptor", 0, &descriptor), 0);
  constexpr int kWorkspace = 402, kEngines = 1301, kInt64 = 3;
  const int64_t set[] = {7, 8};
  ASSERT_EQ(call("cudnnBackendSetAttribute", descriptor, kEngines, kInt64, int64_t{2},
                 static_cast<const void*>(set)),
            0);
  const auto get = [&](int name) {
    int64_t found = 0, values[2] = {-1, -1};
    EXPECT_EQ(call("cudnnBackendGetAttribute", descriptor, name, kInt64, int64_t{2}, &found,
                   static_cast<void*>(values)),
              0);
    return std::vector<int64_t>(values, values + found);
  };
  EXPECT_EQ(get(kEngines), (std::vector<int64_t>{7, 8}));
  EXPECT_EQ(get(kWorkspace), std::vector<int64_t>{0});
}

}  // namespace
