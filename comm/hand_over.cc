// SPDX-License-Identifier: Apache-2.0
#include "comm/hand_over.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <utility>

#include "core/check.h"
#include "core/kept_tensors.h"

namespace smp::comm {
namespace {

c10::impl::VirtualGuardImpl guard_of(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

c10::Stream current_stream(at::Device device) { return guard_of(device).getStream(device); }

at::Tensor make_elements(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
}

class HandingSender final : public Sender {
 public:
  HandingSender(std::unique_ptr<Sender> host, std::shared_ptr<HandOverQueue> queue,
                const ChannelSpec& spec)
      : host_(std::move(host)),
        queue_(std::move(queue)),
        device_(spec.device),
        bytes_(spec.bytes - spec.host_bytes) {}

  void set_size(const MessageSize& size) override {
    host_->set_size({size.host_bytes});
    bytes_ = size.bytes - size.host_bytes;
  }

  const at::Tensor& prepare() override {
    const at::Tensor& message = host_->prepare();
    if (!next_.defined()) {
      next_ = make_elements(bytes_, device_);
    }
    return message;
  }

  at::Tensor device_part() override { return next_; }

  void send() override {
    const c10::Stream stream = current_stream(device_);
    c10::Event made(device_.type());
    made.record(stream);
    queue_->put({std::exchange(next_, at::Tensor()), stream, std::move(made)});
    host_->send();
  }

  void flush() override { host_->flush(); }

 private:
  const std::unique_ptr<Sender> host_;
  const std::shared_ptr<HandOverQueue> queue_;
  const at::Device device_;
  int64_t bytes_;
  at::Tensor next_;
};

class HandingReceiver final : public Receiver {
 public:
  HandingReceiver(std::unique_ptr<Receiver> host, std::shared_ptr<HandOverQueue> queue,
                  const ChannelSpec& spec)
      : host_(std::move(host)), queue_(std::move(queue)), device_(spec.device) {}

  void set_size(const MessageSize& size) override { host_->set_size({size.host_bytes}); }
  void expect(int messages) override { host_->expect(messages); }
  bool has_arrived() override { return host_->has_arrived(); }

  at::Tensor receive() override {
    at::Tensor message = host_->receive();
    received_ = in_current_memory(queue_->take());
    return message;
  }

  at::Tensor device_part() override { return std::exchange(received_, at::Tensor()); }

 private:
  // Memory of another stream would be given to that stream's next work when the tensors here are
  // gone, and not when this stream has done what it does with them.
  at::Tensor in_current_memory(HandedOver given) {
    kept_.forget_done();
    const c10::Stream current = current_stream(device_);
    if (given.stream == current) {
      return given.elements;
    }
    const c10::Stream mover = mover_of(given.elements.device(), current);
    const at::Tensor copy = make_elements(given.elements.numel(), device_);
    try {
      const c10::StreamGuard guard(mover);
      given.made.block(mover);
      copy.copy_(given.elements, /*non_blocking=*/true);
    } catch (const c10::Error&) {  // one of two devices has failed, and the copy may be under way
      core::KeptTensors().keep({given.elements}, mover);
      throw;
    }
    kept_.keep({std::move(given.elements)}, mover);
    return copy;
  }

  // libtorch copies from device to device on the source's current stream, for which the target's
  // waits and the other way round: a stream of its own, or the sender would wait for computations
  // here.
  c10::Stream mover_of(at::Device source, const c10::Stream& current) {
    if (source == device_) {
      return current;
    }
    if (!side_) {
      side_ = guard_of(source).getStreamFromGlobalPool(source);
    }
    return *side_;
  }

  const std::unique_ptr<Receiver> host_;
  const std::shared_ptr<HandOverQueue> queue_;
  const at::Device device_;
  std::optional<c10::Stream> side_;  // stream of the sender's device, where that is another
  core::KeptTensors kept_;           // the sender's, while they are being copied
  at::Tensor received_;
};

}  // namespace

void HandOverQueue::put(HandedOver given) {
  const std::lock_guard<std::mutex> lock(mutex_);
  given_.push_back(std::move(given));
}

HandedOver HandOverQueue::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  SMP_INTERNAL_ASSERT(!given_.empty(), "a message came before its elements");
  HandedOver given = std::move(given_.front());
  given_.pop_front();
  return given;
}

std::shared_ptr<HandOverQueue> HandOvers::open(const Channel& channel, bool sends) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto others = half_open_.find({channel, !sends});
  if (others == half_open_.end()) {
    auto queue = std::make_shared<HandOverQueue>();
    half_open_[{channel, sends}].push_back(queue);
    return queue;
  }
  auto queue = std::move(others->second.front());
  others->second.pop_front();
  if (others->second.empty()) {
    half_open_.erase(others);
  }
  return queue;
}

std::unique_ptr<Sender> make_handing_sender(std::unique_ptr<Sender> host,
                                            std::shared_ptr<HandOverQueue> queue,
                                            const ChannelSpec& spec) {
  return std::make_unique<HandingSender>(std::move(host), std::move(queue), spec);
}

std::unique_ptr<Receiver> make_handing_receiver(std::unique_ptr<Receiver> host,
                                                std::shared_ptr<HandOverQueue> queue,
                                                const ChannelSpec& spec) {
  return std::make_unique<HandingReceiver>(std::move(host), std::move(queue), spec);
}

}  // namespace smp::comm
