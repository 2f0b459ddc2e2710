// SPDX-License-Identifier: Apache-2.0
#include "tests/device/fake_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Backtrace.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>

namespace smp::testing {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr int kFreed = 0xDD;

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

/// Work that was given to a stream and is not done.
struct Queue {
  std::deque<std::function<void()>> tasks;
  uint64_t given = 0;
  uint64_t done = 0;
};

/// The point in a stream where an event was recorded.
struct FakeEvent {
  int number = 0;
  StreamKey stream;
  uint64_t position = 0;
};

struct Block {
  size_t bytes;
  c10::DeviceIndex index;
  std::set<StreamKey> users;
};

/// Of one index, in bytes.
struct Memory {
  size_t used = 0;
  size_t peak = 0;
};

/// All state of the device, under one lock.
class Machine {
 public:
  static Machine& get() {
    static auto* machine = new Machine;  // tensors may outlive the program's end
    return *machine;
  }

  std::recursive_mutex mutex;
  std::map<StreamKey, Queue> queues;
  std::map<void*, Block> blocks;
  std::array<Memory, kDevices> memory;
  std::optional<size_t> limit;  // of each index
  std::vector<std::string> log;
  std::optional<std::array<std::vector<HostUse>, kDevices>> host_uses;
  c10::StreamId streams = 0;
  int events = 0;

  void give(StreamKey stream, std::function<void()> task) {
    Queue& queue = queues[stream];
    queue.tasks.push_back(std::move(task));
    ++queue.given;
  }

  void run_until(StreamKey stream, uint64_t position) {
    Queue& queue = queues[stream];
    while (queue.done < position) {
      const auto task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
      ++queue.done;
      task();
    }
  }

  void run_all(StreamKey stream) { run_until(stream, queues[stream].given); }

  void note(const std::string& line) { log.push_back(line); }

  void note_host(c10::DeviceIndex index, const std::string& what) {
    if (host_uses) (*host_uses)[index].push_back({what, c10::get_backtrace(/*frames_to_skip=*/2)});
  }

  static std::string name(StreamKey stream) { return stream.second == 0 ? "compute" : "copy"; }
};

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local c10::DeviceIndex current_index = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams = {};

StreamKey current_key(c10::DeviceIndex index) { return {index, current_streams[index]}; }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    check(device);
    return c10::Device(kType, std::exchange(current_index, device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(kType, current_index); }
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
    const Lock lock(Machine::get().mutex);
    return c10::Stream(c10::Stream::UNSAFE, device, ++Machine::get().streams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = std::exchange(current_streams[stream.device_index()], stream.id());
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    Machine& machine = Machine::get();
    const Lock lock(machine.mutex);
    if (*event == nullptr) *event = new FakeEvent{machine.events++, {}, 0};
    auto& recorded = *static_cast<FakeEvent*>(*event);
    recorded.stream = key_of(stream);
    recorded.position = machine.queues[recorded.stream].given;
    machine.note(c10::str(Machine::name(recorded.stream), " records event ", recorded.number));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Machine& machine = Machine::get();
    const Lock lock(machine.mutex);
    const FakeEvent waited = *static_cast<FakeEvent*>(event);
    machine.note(c10::str(Machine::name(key_of(stream)), " waits for event ", waited.number));
    machine.give(key_of(stream),
                 [waited] { Machine::get().run_until(waited.stream, waited.position); });
  }
  bool queryEvent(void* event) const override {
    const Lock lock(Machine::get().mutex);
    const auto& asked = *static_cast<FakeEvent*>(event);
    return Machine::get().queues[asked.stream].done >= asked.position;
  }
  void synchronizeEvent(void* event) const override {
    Machine& machine = Machine::get();
    const Lock lock(machine.mutex);
    const auto& waited = *static_cast<FakeEvent*>(event);
    machine.note(c10::str("host waits for event ", waited.number));
    machine.note_host(waited.stream.first, "waits for an event");
    machine.run_until(waited.stream, waited.position);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<FakeEvent*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Lock lock(Machine::get().mutex);
    return Machine::get().queues[key_of(stream)].tasks.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const Lock lock(Machine::get().mutex);
    Machine::get().note_host(stream.device_index(), "waits for a stream");
    Machine::get().run_all(key_of(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Machine& machine = Machine::get();
    const Lock lock(machine.mutex);
    const auto block = machine.blocks.find(data.get());
    if (block == machine.blocks.end()) return;  // an empty tensor
    block->second.users.insert(key_of(stream));
    machine.note(c10::str(Machine::name(key_of(stream)), " uses memory of another stream"));
  }

 private:
  static void check(c10::Device device) {
    TORCH_CHECK(0 <= device.index() && device.index() < kDevices, "there is no device ", device);
  }
};

void free_block(void* memory) {
  Machine& machine = Machine::get();
  const Lock lock(machine.mutex);
  const auto block = machine.blocks.find(memory);
  for (const StreamKey& user : block->second.users) machine.run_all(user);
  std::memset(memory, kFreed, block->second.bytes);
  machine.memory[block->second.index].used -= block->second.bytes;
  machine.blocks.erase(block);
  std::free(memory);
}

class FakeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current_index);
    if (bytes == 0) return c10::DataPtr(nullptr, device);
    const Lock lock(Machine::get().mutex);
    take(bytes);
    constexpr size_t kAlignment = 64;
    void* memory =
        std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    Machine::get().blocks[memory] = {bytes, current_index, {current_key(current_index)}};
    return c10::DataPtr(memory, memory, &free_block, device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static void take(size_t bytes) {
    Memory& memory = Machine::get().memory[current_index];
    const auto limit = Machine::get().limit;
    TORCH_CHECK_WITH(OutOfMemoryError, !limit || memory.used + bytes <= *limit,
                     "fake out of memory. Tried to allocate ", bytes, " bytes. Device ",
                     static_cast<int>(current_index), " has ", limit.value_or(0), ", of which ",
                     memory.used, " are allocated.");
    memory.used += bytes;
    memory.peak = std::max(memory.peak, memory.used);
  }
};

FakeAllocator& allocator() {
  static FakeAllocator allocator;
  return allocator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  Hooks() {
    for (int i = 0; i < kDevices; ++i) {
      generators.push_back(at::make_generator<at::CPUGeneratorImpl>());
    }
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return generators.at(index < 0 ? current_index : index);
  }
  std::vector<at::Generator> generators;
};

const c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator(), kKey, dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKey,
                                           dtype.value_or(at::kFloat));
}

/// The tensor's memory as the CPU's; not kept alive, as a copying device does not.
at::Tensor as_cpu(const at::Tensor& tensor) {
  const at::Tensor result =
      at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                    at::TensorOptions(tensor.scalar_type()));
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

/// Whether a device can copy this by itself: bytes that follow each other.
bool is_plain_copy(const at::Tensor& from, const at::Tensor& to) {
  return from.strides() == to.strides() && from.is_non_overlapping_and_dense() &&
         from.scalar_type() == to.scalar_type() && !from.is_conj() && !from.is_neg();
}

/// Whether this thread runs an operator on the CPU, whose copies are none of the device's.
thread_local bool in_fallback = false;

void note_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (in_fallback || from.device() == to.device()) return;
  const at::Tensor& there = from.is_cpu() ? to : from;
  Machine::get().note_host(
      there.device().index(),
      c10::str("copies ", from.scalar_type(), " ", from.sizes(), " to the ",
               to.is_cpu() ? "host" : "device", non_blocking ? "" : ", waits"));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const at::Device device = from.is_cpu() ? to.device() : from.device();
  const StreamKey stream = current_key(device.index());
  const at::Tensor source = as_cpu(from), target = as_cpu(to);
  Machine& machine = Machine::get();
  const Lock lock(machine.mutex);
  note_copy(from, to, non_blocking);
  if (non_blocking) {
    TORCH_CHECK(from.device() == to.device() || is_plain_copy(from, to),
                "a copy that is not waited for needs the host to arrange elements: from strides ",
                from.strides(), " to ", to.strides());
    machine.note(c10::str(Machine::name(stream), to.is_cpu()     ? " copies to the host"
                                                 : from.is_cpu() ? " copies to the device"
                                                                 : " copies on the device"));
    machine.give(stream, [source, target]() mutable {
      const at::AutoDispatchBelowADInplaceOrView below;
      target.copy_(source);
    });
    return to;
  }
  machine.run_all(stream);
  const at::AutoDispatchBelowADInplaceOrView below;
  target.copy_(source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

/// Does what the current streams were given.
void catch_up() {
  const Lock lock(Machine::get().mutex);
  for (c10::DeviceIndex i = 0; i < kDevices; ++i) Machine::get().run_all(current_key(i));
}

/// A kernel of its own: that of the CPU would be run by `on_cpu`, which resizes what it returns.
const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(tensor.device());
  catch_up();
  return at::native::resize_(tensor, size, format);
}

/// Those after which CUDA's kernels have the host wait, since it needs a value or a size.
bool is_waited_for(const std::string& op) {
  static const std::set<std::string> ops = {
      "aten::_local_scalar_dense", "aten::equal",    "aten::nonzero",
      "aten::masked_select",       "aten::_unique2", "aten::unique_consecutive"};
  return ops.count(op) > 0;
}

/// Runs at once, after what its stream was given.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  catch_up();
  const std::string& name = op.operator_name().name;
  const size_t count = op.schema().arguments().size();
  const c10::IValue& first = count == 0 ? c10::IValue() : torch::jit::peek(*stack, 0, count);
  if (is_waited_for(name) && first.isTensor()) {
    const at::Tensor& tensor = first.toTensor();
    const Lock lock(Machine::get().mutex);
    Machine::get().note_host(
        tensor.device().index(),
        c10::str("waits in ", name, " of ", tensor.scalar_type(), " ", tensor.sizes()));
  }
  const bool before = std::exchange(in_fallback, true);
  const auto restore = c10::make_scope_exit([&] { in_fallback = before; });
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

/// The copy changes signs.
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool registered = [] {
  c10::register_privateuse1_backend("fake");
  c10::SetAllocator(kType, &allocator());
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

at::Device fake_device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

void move_to_fake(const std::vector<at::Tensor>& tensors, at::Device device) {
  for (const at::Tensor& tensor : tensors) {
    tensor.unsafeGetTensorImpl()->shallow_copy_from(tensor.detach().to(device).getIntrusivePtr());
  }
}

std::vector<std::string> take_fake_log() {
  const Lock lock(Machine::get().mutex);
  Machine::get().events = 0;
  return std::exchange(Machine::get().log, {});
}

FakeMemoryLimit::FakeMemoryLimit(size_t bytes) {
  const Lock lock(Machine::get().mutex);
  Machine::get().limit = bytes;
  for (Memory& memory : Machine::get().memory) memory.peak = memory.used;
}

FakeMemoryLimit::~FakeMemoryLimit() {
  const Lock lock(Machine::get().mutex);
  Machine::get().limit.reset();
}

HostUses::HostUses() {
  const Lock lock(Machine::get().mutex);
  Machine::get().host_uses.emplace();
}

HostUses::~HostUses() {
  const Lock lock(Machine::get().mutex);
  Machine::get().host_uses.reset();
}

std::vector<HostUse> HostUses::take(int index) {
  const Lock lock(Machine::get().mutex);
  return std::exchange(Machine::get().host_uses->at(index), {});
}

size_t FakeMemoryLimit::peak(int index) const {
  const Lock lock(Machine::get().mutex);
  return Machine::get().memory.at(index).peak;
}

}  // namespace smp::testing
