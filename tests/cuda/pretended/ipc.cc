// SPDX-License-Identifier: Apache-2.0
// Memory and events that processes share. Only such memory holds anything, in a file without a name
// that they find by way of /proc, behind a count of those that have it open.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>

#include "tests/cuda/pretended/machine.h"

using namespace pretended;

namespace {

constexpr size_t kHandle = 64;      // CUDA_IPC_HANDLE_SIZE
constexpr unsigned kShareable = 6;  // without a time, for other processes

/// A cudaIpcMemHandle_t or, without `file` and `bytes`, a cudaIpcEventHandle_t.
struct Handle {
  char name[16];
  pid_t process;
  int file;  ///< descriptor
  size_t bytes;
  char more[kHandle - 32];
};
static_assert(sizeof(Handle) == kHandle);

constexpr char kMemory[16] = "CUDA memory", kEvent[16] = "CUDA event";

constexpr size_t kCount = 64;  // bytes before what the memory holds

struct SharedFile {
  int fd;
  char* data;
  size_t bytes;  // bytes of the memory

  std::atomic<int>& opens() const { return *reinterpret_cast<std::atomic<int>*>(data); }
};

/// The files of memory made here that others have heard of, and of memory opened here.
std::map<const char*, SharedFile>& files() {
  static auto& all = *new std::map<const char*, SharedFile>;
  return all;
}

bool add_file(const void* memory, int fd, size_t bytes) {
  void* data = fd < 0 ? MAP_FAILED
                      : mmap(nullptr, kCount + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return false;
  files()[static_cast<const char*>(memory)] = {fd, static_cast<char*>(data), bytes};
  return true;
}

SharedFile* file_of(const void* memory) {
  const auto found = files().find(static_cast<const char*>(memory));
  return found == files().end() ? nullptr : &found->second;
}

void drop_file(const void* memory) {
  const SharedFile& file = *file_of(memory);
  munmap(file.data, kCount + file.bytes);
  close(file.fd);
  files().erase(static_cast<const char*>(memory));
}

bool is_mine_to_open(const Handle& handle, const char (&name)[16]) {
  return !std::memcmp(handle.name, name, sizeof(name)) && handle.process != getpid();
}

bool is_without_ipc() { return std::getenv("PRETENDED_CUDA_NO_IPC"); }

}  // namespace

void pretended::forget_shared(const void* memory) {
  const SharedFile* file = file_of(memory);
  if (!file) return;
  if (file->opens() > 0) {
    std::fprintf(stderr, "pretended CUDA: memory is freed that another process has open\n");
    std::abort();
  }
  drop_file(memory);
}

char* pretended::shared_bytes(const void* address) {
  const auto* at = static_cast<const char*>(address);
  const auto next = files().upper_bound(at);
  if (next == files().begin()) return nullptr;
  const auto& [memory, file] = *std::prev(next);
  return at < memory + file.bytes ? file.data + kCount + (at - memory) : nullptr;
}

PRETENDED_API int cudaIpcGetMemHandle(Handle* handle, void* memory) {
  const auto lock = Machine::lock();
  Machine& machine = Machine::get();
  if (is_without_ipc()) return machine.fail(kNotSupported);
  const size_t bytes = machine.size_of(memory);
  if (bytes == 0) return machine.fail(kInvalidValue);
  if (!file_of(memory)) {
    const int fd = memfd_create("pretended CUDA", MFD_CLOEXEC);
    if (ftruncate(fd, static_cast<off_t>(kCount + bytes)) || !add_file(memory, fd, bytes)) {
      return machine.fail(kMemoryAllocation);
    }
  }
  *handle = {{}, getpid(), file_of(memory)->fd, bytes, {}};
  std::memcpy(handle->name, kMemory, sizeof(kMemory));
  return kSuccess;
}

PRETENDED_API int cudaIpcOpenMemHandle(void** memory, Handle handle, unsigned /*flags*/) {
  const auto lock = Machine::lock();
  Machine& machine = Machine::get();
  if (!is_mine_to_open(handle, kMemory)) return machine.fail(kInvalidHandle);
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.process, handle.file);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return machine.fail(kInvalidHandle);
  if (const Error error = machine.open(memory, handle.bytes)) return error;
  if (!add_file(*memory, fd, handle.bytes)) return machine.fail(kInvalidHandle);
  ++file_of(*memory)->opens();
  return kSuccess;
}

PRETENDED_API int cudaIpcCloseMemHandle(void* memory) {
  const auto lock = Machine::lock();
  const Error error = Machine::get().close(memory);
  if (error) return error;
  --file_of(memory)->opens();
  drop_file(memory);
  return kSuccess;
}

PRETENDED_API int cudaIpcGetEventHandle(Handle* handle, const Event* event) {
  const auto lock = Machine::lock();
  if (event->flags != kShareable) return Machine::get().fail(kInvalidHandle);
  *handle = {{}, getpid(), 0, 0, {}};
  std::memcpy(handle->name, kEvent, sizeof(kEvent));
  return kSuccess;
}

PRETENDED_API int cudaIpcOpenEventHandle(Event** event, Handle handle) {
  const auto lock = Machine::lock();
  if (!is_mine_to_open(handle, kEvent)) return Machine::get().fail(kInvalidHandle);
  *event = new Event{kShareable};
  return kSuccess;
}
