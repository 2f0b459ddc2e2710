// SPDX-License-Identifier: Apache-2.0
#include "comm/device/thread_memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>

#include <cstring>
#include <memory>
#include <utility>

namespace smp::comm {
namespace {

// Handles are addresses of objects that another thread holds.
template <class T>
IpcHandle handle_to(const T* held) {
  IpcHandle handle{};
  std::memcpy(handle.data(), &held, sizeof held);
  return handle;
}

template <class T>
T* held_by(const IpcHandle& handle) {
  T* held;
  std::memcpy(&held, handle.data(), sizeof held);
  return held;
}

class ThreadEvent final : public IpcEvent {
 public:
  explicit ThreadEvent(std::shared_ptr<c10::Event> event) : event_(std::move(event)) {}

  void record(const c10::Stream& stream) override { event_->record(stream); }
  void block(const c10::Stream& stream) override { event_->block(stream); }
  bool query() override { return event_->query(); }
  IpcHandle handle() override { return handle_to(&event_); }

 private:
  const std::shared_ptr<c10::Event> event_;
};

class ThreadMemory final : public DeviceIpc {
 public:
  at::Tensor make_memory(at::Device device, int64_t bytes) override {
    return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
  }
  IpcHandle handle_of(const at::Tensor& memory) override {
    return handle_to(memory.unsafeGetTensorImpl());
  }
  at::Tensor open_memory(const IpcHandle& handle, at::Device /*device*/,
                         int64_t /*bytes*/) override {
    return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
        held_by<c10::TensorImpl>(handle)));
  }

  std::unique_ptr<IpcEvent> make_event(at::Device device) override {
    return std::make_unique<ThreadEvent>(std::make_shared<c10::Event>(device.type()));
  }
  std::unique_ptr<IpcEvent> open_event(const IpcHandle& handle, at::Device /*device*/) override {
    return std::make_unique<ThreadEvent>(*held_by<const std::shared_ptr<c10::Event>>(handle));
  }
};

}  // namespace

DeviceIpc& thread_memory() {
  static auto& memory = *new ThreadMemory;
  return memory;
}

}  // namespace smp::comm
