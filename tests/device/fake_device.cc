// SPDX-License-Identifier: Apache-2.0
#include "tests/device/fake_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>

#include "tests/device/fake_machine.h"

namespace smp::testing {
namespace {

thread_local c10::DeviceIndex current_index = 0;
thread_local std::array<c10::StreamId, kFakeDevices> current_streams = {};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kFakeType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    check(device);
    return c10::Device(kFakeType, std::exchange(current_index, device.index()));
  }
  c10::Device getDevice() const override {
    FakeMachine::check_call();
    return c10::Device(kFakeType, current_index);
  }
  void setDevice(c10::Device device) const override {
    check(device);
    current_index = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_index = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    const FakeLock lock(machine().mutex);
    return c10::Stream(c10::Stream::UNSAFE, device, machine().pool_stream(device.index()).second);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = std::exchange(current_streams[stream.device_index()], stream.id());
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kFakeDevices; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag flag) const override {
    const FakeLock lock(machine().mutex);
    auto* recorded = static_cast<FakeEvent*>(*event);
    machine().record(recorded, key_of(stream));
    recorded->is_timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    *event = recorded;
  }
  void block(void* event, const c10::Stream& stream) const override {
    const FakeLock lock(machine().mutex);
    machine().block(*static_cast<FakeEvent*>(event), key_of(stream));
  }
  bool queryEvent(void* event) const override {
    const FakeLock lock(machine().mutex);
    return machine().query(*static_cast<FakeEvent*>(event));
  }
  void synchronizeEvent(void* event) const override {
    const FakeLock lock(machine().mutex);
    machine().synchronize(*static_cast<FakeEvent*>(event));
  }
  /// Uses the fake's clock: each task of a stream takes a millisecond of it.
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const FakeLock lock(machine().mutex);
    const auto& first = *static_cast<FakeEvent*>(from);
    const auto& second = *static_cast<FakeEvent*>(to);
    TORCH_CHECK(first.is_timed && second.is_timed, "an event without a time");
    TORCH_CHECK(first.stream == second.stream, "events of two streams");
    return static_cast<double>(second.position) - static_cast<double>(first.position);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<FakeEvent*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    const FakeLock lock(machine().mutex);
    return machine().query(key_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const FakeLock lock(machine().mutex);
    machine().note_host(stream.device_index(), "waits for a stream");
    machine().synchronize(key_of(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const FakeLock lock(machine().mutex);
    machine().record_use(data.get(), key_of(stream));
  }

 private:
  static FakeMachine& machine() { return FakeMachine::get(); }
  static void check(c10::Device device) {
    TORCH_CHECK(0 <= device.index() && device.index() < kFakeDevices, "there is no device ",
                device);
  }
};

void free_block(void* memory) {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().free(memory);
}

/// Its cache gives nothing back until it is emptied.
class FakeAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kFakeType, current_index);
    if (bytes == 0) return c10::DataPtr(nullptr, device);
    const FakeLock lock(FakeMachine::get().mutex);
    void* memory = FakeMachine::get().allocate(bytes, current_fake_stream(current_index));
    return c10::DataPtr(memory, memory, &free_block, device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(for_kernels(to), for_kernels(from), bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    const FakeLock lock(FakeMachine::get().mutex);
    FakeMachine::get().held = FakeMachine::get().used;
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const FakeLock lock(FakeMachine::get().mutex);
    FakeMachine::get().record_use(data.get(), key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const FakeLock lock(FakeMachine::get().mutex);
    const FakeMachine& machine = FakeMachine::get();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = static_cast<int64_t>(machine.used.at(index));
    stats.allocated_bytes[0].peak = static_cast<int64_t>(machine.peak.at(index));
    stats.reserved_bytes[0].current = static_cast<int64_t>(machine.held.at(index));
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    const FakeLock lock(FakeMachine::get().mutex);
    FakeMachine::get().peak.at(index) = FakeMachine::get().used.at(index);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const FakeLock lock(FakeMachine::get().mutex);
    FakeMachine::get().refuse_failed({index, 0});
    const size_t total = FakeMachine::get().limit.value_or(kFakeMemory);
    return {total - FakeMachine::get().held.at(index), total};
  }
};

void free_pinned(void* memory) {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().free_pinned(memory);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return c10::DataPtr(nullptr, at::kCPU);
    const FakeLock lock(FakeMachine::get().mutex);
    void* memory = FakeMachine::get().allocate_pinned(bytes);
    return c10::DataPtr(memory, memory, &free_pinned, at::kCPU);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  Hooks() {
    for (int i = 0; i < kFakeDevices; ++i) {
      generators.push_back(at::make_generator<at::CPUGeneratorImpl>());
    }
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kFakeDevices; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return generators.at(index < 0 ? current_index : index);
  }
  bool isPinnedPtr(const void* data) const override {
    const FakeLock lock(FakeMachine::get().mutex);
    return FakeMachine::get().is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  std::vector<at::Generator> generators;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool registered = [] {
  static FakeAllocator allocator;
  static Hooks hooks;
  c10::register_privateuse1_backend("fake");
  c10::SetAllocator(kFakeType, &allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

StreamKey current_fake_stream(c10::DeviceIndex index) { return {index, current_streams[index]}; }

c10::DeviceIndex current_fake_index() { return current_index; }

at::Device fake_device(int index) { return {kFakeType, static_cast<c10::DeviceIndex>(index)}; }

void move_to_fake(const std::vector<at::Tensor>& tensors, at::Device device) {
  for (const at::Tensor& tensor : tensors) {
    tensor.unsafeGetTensorImpl()->shallow_copy_from(tensor.detach().to(device).getIntrusivePtr());
  }
}

void grow(c10::StorageImpl& storage, size_t bytes) {
  if (bytes <= storage.nbytes()) return;
  c10::DataPtr larger = storage.allocator()->allocate(bytes);
  std::memcpy(for_kernels(larger.get()), for_kernels(storage.data()), storage.nbytes());
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(bytes);
}

std::vector<std::string> take_fake_log() {
  FakeMachine& machine = FakeMachine::get();
  const FakeLock lock(machine.mutex);
  machine.events = 0;
  return std::exchange(machine.log, {});
}

int take_fake_launches() {
  FakeMachine& machine = FakeMachine::get();
  const FakeLock lock(machine.mutex);
  return std::exchange(machine.launches, 0);
}

int take_fake_kernels() {
  FakeMachine& machine = FakeMachine::get();
  const FakeLock lock(machine.mutex);
  return std::exchange(machine.kernels, 0);
}

int fake_streams() {
  FakeMachine& machine = FakeMachine::get();
  const FakeLock lock(machine.mutex);
  return machine.streams();
}

FakeStreamPool::FakeStreamPool(int streams) {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().pooled_streams = streams;
}

FakeStreamPool::~FakeStreamPool() {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().pooled_streams.reset();
}

FakeMemoryLimit::FakeMemoryLimit(size_t bytes) {
  FakeMachine& machine = FakeMachine::get();
  const FakeLock lock(machine.mutex);
  machine.limit = bytes;
  machine.peak = machine.used;
}

FakeMemoryLimit::~FakeMemoryLimit() {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().limit.reset();
}

size_t FakeMemoryLimit::peak(int index) const {
  const FakeLock lock(FakeMachine::get().mutex);
  return FakeMachine::get().peak.at(index);
}

size_t fake_pinned_bytes() {
  const FakeLock lock(FakeMachine::get().mutex);
  return FakeMachine::get().pinned_bytes();
}

FailingDevice::FailingDevice(int index, int64_t kernels) : index_(index) {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().kernels_left[index] = kernels;
}

FailingDevice::~FailingDevice() {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().mend(static_cast<c10::DeviceIndex>(index_));
}

BrokenRules::BrokenRules() {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().broken_rules.emplace();
}

BrokenRules::~BrokenRules() {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().broken_rules.reset();
}

std::vector<std::string> BrokenRules::take() {
  const FakeLock lock(FakeMachine::get().mutex);
  return std::exchange(*FakeMachine::get().broken_rules, {});
}

HostUses::HostUses() {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().host_uses.emplace();
}

HostUses::~HostUses() {
  const FakeLock lock(FakeMachine::get().mutex);
  FakeMachine::get().host_uses.reset();
}

std::vector<HostUse> HostUses::take(int index) {
  const FakeLock lock(FakeMachine::get().mutex);
  return std::exchange(FakeMachine::get().host_uses->at(index), {});
}

}  // namespace smp::testing
