// SPDX-License-Identifier: Apache-2.0
#include "tests/chaos/chaos.h"

#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "comm/message_channel.h"
#include "comm/threads/run_ranks.h"
#include "runtime/runtime.h"

namespace smp::testing {
namespace {

using comm::Channels;
using comm::ChannelSpec;
using comm::CommunicatorPtr;

/// Where a rank's delays come from.
class Delays {
 public:
  Delays(uint64_t seed, int rank) : random_(seed * 1009 + static_cast<uint64_t>(rank)) {}

  void sleep() {
    const auto time = draw();
    if (time.count() > 0) std::this_thread::sleep_for(time);
  }

 private:
  std::chrono::microseconds draw() {
    constexpr int kLong = 20000, kShort = 2000;  // us
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto kind = random_() % 400;
    if (kind == 0) return std::chrono::microseconds(kLong);
    return std::chrono::microseconds(kind % 3 == 0 ? random_() % kShort : 0);
  }

  std::mutex mutex_;
  std::mt19937_64 random_;
};

using DelaysPtr = std::shared_ptr<Delays>;

class DelayedWork final : public Work {
 public:
  DelayedWork(WorkPtr work, DelaysPtr delays)
      : work_(std::move(work)), delays_(std::move(delays)) {}

  bool test() override { return work_->test(); }
  void wait() override {
    delays_->sleep();
    work_->wait();
  }

 private:
  const WorkPtr work_;
  const DelaysPtr delays_;
};

class DelayedSender final : public comm::Sender {
 public:
  DelayedSender(std::unique_ptr<comm::Sender> sender, DelaysPtr delays)
      : sender_(std::move(sender)), delays_(std::move(delays)) {}

  void set_size(const comm::MessageSize& size) override { sender_->set_size(size); }
  const at::Tensor& prepare() override {
    delays_->sleep();
    return sender_->prepare();
  }
  void send() override {
    delays_->sleep();
    sender_->send();
  }
  void flush() override {
    delays_->sleep();
    sender_->flush();
  }

 private:
  const std::unique_ptr<comm::Sender> sender_;
  const DelaysPtr delays_;
};

class DelayedReceiver final : public comm::Receiver {
 public:
  DelayedReceiver(std::unique_ptr<comm::Receiver> receiver, DelaysPtr delays)
      : receiver_(std::move(receiver)), delays_(std::move(delays)) {}

  void set_size(const comm::MessageSize& size) override { receiver_->set_size(size); }
  void expect(int messages) override { receiver_->expect(messages); }
  at::Tensor receive() override {
    delays_->sleep();
    return receiver_->receive();
  }

 private:
  const std::unique_ptr<comm::Receiver> receiver_;
  const DelaysPtr delays_;
};

class DelayedCommunicator final : public comm::Communicator {
 public:
  DelayedCommunicator(CommunicatorPtr communicator, DelaysPtr delays, ChannelKind channels)
      : communicator_(std::move(communicator)), delays_(std::move(delays)), channels_(channels) {}

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  const std::string& name() const override { return communicator_->name(); }

  WorkPtr isend(const at::Tensor& tensor, int destination, comm::Tag tag) override {
    delays_->sleep();
    return delayed(communicator_->isend(tensor, destination, tag));
  }
  WorkPtr irecv(const at::Tensor& tensor, int source, comm::Tag tag) override {
    delays_->sleep();
    return delayed(communicator_->irecv(tensor, source, tag));
  }
  comm::ReceiveWorkPtr irecv_from_any(const at::Tensor& tensor, comm::Tag tag) override {
    delays_->sleep();
    return communicator_->irecv_from_any(tensor, tag);
  }
  WorkPtr start(const comm::Collective& call) override {
    delays_->sleep();
    return delayed(communicator_->start(call));
  }
  WorkPtr start(at::Device device, comm::CollectiveTask task) override {
    delays_->sleep();
    return delayed(communicator_->start(device, std::move(task)));
  }
  at::Tensor shared_tensor(int64_t numel, at::ScalarType dtype) override {
    delays_->sleep();
    return communicator_->shared_tensor(numel, dtype);
  }

  Channels open_channels(const std::vector<ChannelSpec>& outgoing,
                         const std::vector<ChannelSpec>& incoming) override {
    Channels opened =
        channels_ == ChannelKind::kMessages
            ? over_messages(outgoing, incoming)
            : communicator_->open_channels(without_held(outgoing), without_held(incoming));
    Channels result;
    for (auto& sender : opened.senders) {
      result.senders.push_back(std::make_unique<DelayedSender>(std::move(sender), delays_));
    }
    for (auto& receiver : opened.receivers) {
      result.receivers.push_back(std::make_unique<DelayedReceiver>(std::move(receiver), delays_));
    }
    return result;
  }

  CommunicatorPtr split(const std::vector<int>& members, const std::string& name) override {
    return std::make_shared<DelayedCommunicator>(communicator_->split(members, name), delays_,
                                                 channels_);
  }
  void set_device_transport(const comm::DeviceTransport& transport) override {
    communicator_->set_device_transport(transport);
  }
  comm::DeviceTransport device_transport() const override {
    return communicator_->device_transport();
  }
  void abort(const std::string& reason) noexcept override { communicator_->abort(reason); }
  std::string abort_text() const override { return communicator_->abort_text(); }
  void set_timeout(std::chrono::milliseconds timeout) override {
    communicator_->set_timeout(timeout);
  }
  std::chrono::milliseconds timeout() const override { return communicator_->timeout(); }
  void check_collectives(bool on) override { communicator_->check_collectives(on); }

 private:
  WorkPtr delayed(WorkPtr work) const {
    return std::make_shared<DelayedWork>(std::move(work), delays_);
  }

  static std::vector<ChannelSpec> without_held(std::vector<ChannelSpec> specs) {
    for (ChannelSpec& spec : specs) spec.held = 0;
    return specs;
  }

  Channels over_messages(const std::vector<ChannelSpec>& outgoing,
                         const std::vector<ChannelSpec>& incoming) {
    Channels result;
    for (const ChannelSpec& spec : outgoing) {
      result.senders.push_back(comm::make_message_sender(shared_from_this(), spec));
    }
    for (const ChannelSpec& spec : incoming) {
      result.receivers.push_back(comm::make_message_receiver(shared_from_this(), spec));
    }
    return result;
  }

  const CommunicatorPtr communicator_;
  const DelaysPtr delays_;
  const ChannelKind channels_;
};

}  // namespace

CommunicatorPtr with_delays(CommunicatorPtr communicator, const Chaos& chaos) {
  const int rank = communicator->rank();
  return std::make_shared<DelayedCommunicator>(
      std::move(communicator), std::make_shared<Delays>(chaos.seed, rank), chaos.channels);
}

void run_in_chaos(int ranks, const Config& config, const Chaos& chaos,
                  const std::function<void()>& program) {
  comm::run_ranks(ranks, [&](const CommunicatorPtr& world) {
    const std::vector<std::string> hosts(static_cast<size_t>(ranks), "threads");
    const auto runtime =
        std::make_shared<runtime::Runtime>(config, with_delays(world, chaos), hosts);
    const auto delays = std::make_shared<Delays>(~chaos.seed, world->rank());
    runtime->execution.messages_ahead = 1;
    runtime->execution.on_action = [delays](const pipeline::Action&) { delays->sleep(); };
    const runtime::ThreadRuntime scope(runtime);
    program();
  });
}

}  // namespace smp::testing
