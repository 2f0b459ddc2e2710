// SPDX-License-Identifier: Apache-2.0
// Memory and events of the fake device that processes share, or threads in their place. Memory is a
// file without a name, which the other process opens by way of /proc. A process has the streams of
// its own only: so what it records an event behind is done at once, if another process may wait for
// that. Between threads streams go on as late as they may.

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "comm/device/ipc.h"
#include "tests/device/fake_machine.h"

namespace smp::testing {
namespace {

using comm::IpcHandle;

constexpr size_t kHeader = 4096;  // bytes before the memory

size_t made_bytes = 0;
bool opens_rubbish = false;  // see RubbishFakeIpc

struct FakeHandle {
  pid_t process;
  int number;  // descriptor of the memory; number of the event
  char* memory;
};

IpcHandle to_handle(const FakeHandle& fake) {
  IpcHandle handle{};
  std::memcpy(handle.data(), &fake, sizeof fake);
  return handle;
}

FakeHandle of_handle(const IpcHandle& handle) {
  FakeHandle fake;
  std::memcpy(&fake, handle.data(), sizeof fake);
  return fake;
}

/// So often has other memory been opened.
std::atomic<int>& opens_of(char* file) { return *reinterpret_cast<std::atomic<int>*>(file); }

char* map_file(int fd, size_t bytes) {
  void* file = mmap(nullptr, kHeader + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  TORCH_CHECK(file != MAP_FAILED, "fake error: out of memory");
  return static_cast<char*>(file);
}

char* on_device(char* file) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(file + kHeader) | kOnDevice);
}

at::Tensor as_tensor(char* memory, at::Device device, int64_t bytes,
                     const std::function<void(void*)>& deleter) {
  return at::for_blob(memory, {bytes})
      .deleter(deleter)
      .options(at::TensorOptions(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

/// The event itself, of the process that has made it.
struct SharedEvent {
  ~SharedEvent() { delete event; }
  FakeEvent* event = nullptr;
  bool is_waited_for_here = false;
};

/// Those of this process by their numbers.
std::map<int, std::weak_ptr<SharedEvent>>& events() {
  static auto& made = *new std::map<int, std::weak_ptr<SharedEvent>>;
  return made;
}

class FakeIpcEvent final : public comm::IpcEvent {
 public:
  FakeIpcEvent(std::shared_ptr<SharedEvent> event, int number)
      : event_(std::move(event)), number_(number) {}

  void record(const c10::Stream& stream) override {
    const FakeLock lock(machine().mutex);
    machine().record(event_->event, key_of(stream));
    if (!event_->is_waited_for_here) machine().run_all(key_of(stream));
  }

  void block(const c10::Stream& stream) override {
    if (!event_) return;  // another process', which has done it
    const FakeLock lock(machine().mutex);
    TORCH_CHECK(event_->event != nullptr, "fake error: a wait for an event that is not recorded");
    machine().block(*event_->event, key_of(stream));
  }

  bool query() override {
    const FakeLock lock(machine().mutex);
    return machine().stuck == 0 && machine().query(*event_->event);
  }

  IpcHandle handle() override { return to_handle({getpid(), number_, nullptr}); }

 private:
  static FakeMachine& machine() { return FakeMachine::get(); }

  const std::shared_ptr<SharedEvent> event_;  // null: another process'
  const int number_;
};

class FakeIpc final : public comm::DeviceIpc {
 public:
  at::Tensor make_memory(at::Device device, int64_t bytes) override {
    const FakeLock lock(machine().mutex);
    machine().refuse_failed({device.index(), 0});
    const int fd = memfd_create("fake device", MFD_CLOEXEC);
    const size_t size = static_cast<size_t>(bytes);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(kHeader + size)) == 0,
                "fake error: out of memory");
    char* const file = map_file(fd, size);
    files_[on_device(file)] = {fd, file};
    made_bytes += size;
    machine().add_block(on_device(file), size, current_fake_stream(device.index()));
    return as_tensor(on_device(file), device, bytes, [fd, file, size](void* memory) {
      const FakeLock lock(machine().mutex);
      if (opens_of(file) > 0) machine().broken("memory is freed that another process has open");
      machine().remove_block(static_cast<char*>(memory));
      files_.erase(static_cast<char*>(memory));
      munmap(file, kHeader + size);
      close(fd);
      made_bytes -= size;
    });
  }

  IpcHandle handle_of(const at::Tensor& memory) override {
    const FakeLock lock(machine().mutex);
    auto* const address = static_cast<char*>(memory.mutable_data_ptr());
    return to_handle({getpid(), files_.at(address).first, address});
  }

  at::Tensor open_memory(const IpcHandle& handle, at::Device device, int64_t bytes) override {
    const FakeLock lock(machine().mutex);
    TORCH_CHECK(!machine().refuses_ipc, "fake error: invalid resource handle");
    if (opens_rubbish) return at::full({bytes}, 0xDD, at::dtype(at::kByte).device(device));
    const FakeHandle fake = of_handle(handle);
    return fake.process == getpid() ? open_own(fake.memory, device, bytes)
                                    : open_other(fake, device, static_cast<size_t>(bytes));
  }

  std::unique_ptr<comm::IpcEvent> make_event(at::Device) override {
    const FakeLock lock(machine().mutex);
    const auto event = std::make_shared<SharedEvent>();
    events()[++count_] = event;
    return std::make_unique<FakeIpcEvent>(event, count_);
  }

  std::unique_ptr<comm::IpcEvent> open_event(const IpcHandle& handle, at::Device) override {
    const FakeLock lock(machine().mutex);
    const FakeHandle fake = of_handle(handle);
    if (fake.process != getpid()) return std::make_unique<FakeIpcEvent>(nullptr, fake.number);
    const auto event = events().at(fake.number).lock();
    TORCH_CHECK(event, "fake error: invalid resource handle");
    event->is_waited_for_here = true;
    return std::make_unique<FakeIpcEvent>(event, fake.number);
  }

 private:
  static FakeMachine& machine() { return FakeMachine::get(); }

  static at::Tensor open_own(char* memory, at::Device device, int64_t bytes) {
    char* const file = files_.at(memory).second;
    ++opens_of(file);
    return as_tensor(memory, device, bytes, [file](void* closed) {
      const FakeLock lock(machine().mutex);
      // Others may yet read memory that they have opened themselves, at the same address.
      if (opens_of(file) == 1) machine().check_close(static_cast<char*>(closed));
      --opens_of(file);
    });
  }

  static at::Tensor open_other(const FakeHandle& fake, at::Device device, size_t bytes) {
    const std::string path = c10::str("/proc/", fake.process, "/fd/", fake.number);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK(fd >= 0, "fake error: invalid resource handle");
    char* const file = map_file(fd, bytes);
    close(fd);
    ++opens_of(file);
    machine().add_block(on_device(file), bytes, current_fake_stream(device.index()));
    return as_tensor(on_device(file), device, static_cast<int64_t>(bytes),
                     [file, bytes](void* closed) {
                       const FakeLock lock(machine().mutex);
                       machine().check_close(static_cast<char*>(closed));
                       machine().remove_block(static_cast<char*>(closed));
                       --opens_of(file);
                       munmap(file, kHeader + bytes);
                     });
  }

  /// Descriptors and addresses of the files of this process' memory, by that.
  inline static std::map<char*, std::pair<int, char*>> files_;
  int count_ = 0;
};

const bool registered_ipc = [] {
  static auto& ipc = *new FakeIpc;
  comm::register_device_ipc(kFakeType, ipc);
  return true;
}();

}  // namespace

size_t fake_ipc_bytes() {
  const FakeLock lock(FakeMachine::get().mutex);
  return made_bytes;
}

NoFakeIpc::NoFakeIpc() {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().refuses_ipc = true;
}

NoFakeIpc::~NoFakeIpc() {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().refuses_ipc = false;
}

RubbishFakeIpc::RubbishFakeIpc() {
  const FakeLock lock(FakeMachine::get().mutex);
  opens_rubbish = true;
}

RubbishFakeIpc::~RubbishFakeIpc() {
  const FakeLock lock(FakeMachine::get().mutex);
  opens_rubbish = false;
}

StuckFakeIpc::StuckFakeIpc() {
  const FakeLock lock(FakeMachine::get().mutex);
  ++FakeMachine::get().stuck;
}

StuckFakeIpc::~StuckFakeIpc() {
  const FakeLock lock(FakeMachine::get().mutex);
  --FakeMachine::get().stuck;
}

}  // namespace smp::testing
