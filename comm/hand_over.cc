// SPDX-License-Identifier: Apache-2.0
#include "comm/hand_over.h"

#include <c10/core/StreamGuard.h>

#include <optional>
#include <utility>

#include "comm/device_streams.h"
#include "comm/split_channel.h"
#include "core/check.h"
#include "core/kept_tensors.h"

namespace smp::comm {
namespace {

class HandingSender final : public SplitSender {
 public:
  HandingSender(std::unique_ptr<Sender> host, std::shared_ptr<HandOverQueue> queue,
                const ChannelSpec& spec)
      : SplitSender(std::move(host), spec), queue_(std::move(queue)) {}

 private:
  at::Tensor take_elements(int64_t bytes) override { return make_elements(bytes, device()); }

  void send_elements(at::Tensor elements) override {
    const c10::Stream stream = current_stream(device());
    c10::Event made(device().type());
    made.record(stream);
    queue_->put({std::move(elements), stream, std::move(made)});
  }

  const std::shared_ptr<HandOverQueue> queue_;
};

class HandingReceiver final : public SplitReceiver {
 public:
  HandingReceiver(std::unique_ptr<Receiver> host, std::shared_ptr<HandOverQueue> queue,
                  const ChannelSpec& spec)
      : SplitReceiver(std::move(host), spec), queue_(std::move(queue)) {}

 private:
  // Memory of another stream would be given to that stream's next work when the tensors here are
  // gone, and not when this stream has done what it does with them.
  at::Tensor receive_elements(int64_t bytes) override {
    HandedOver given = queue_->take();
    kept_.forget_done();
    const c10::Stream current = current_stream(device());
    if (given.stream == current) {
      return given.elements;
    }
    const c10::Stream mover = mover_of(given.elements.device(), current);
    const at::Tensor copy = make_elements(bytes, device());
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
    if (source == device()) {
      return current;
    }
    if (!side_) {
      side_ = side_stream(source);
    }
    return *side_;
  }

  const std::shared_ptr<HandOverQueue> queue_;
  std::optional<c10::Stream> side_;  // stream of the sender's device, where that is another
  core::KeptTensors kept_;           // the sender's, while they are being copied
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

std::shared_ptr<HandOverQueue> HandOverQueues::open(const Channel& channel, bool sends) {
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
