// SPDX-License-Identifier: Apache-2.0
#include "tests/chaos/chaos.h"

#include <c10/util/ScopeExit.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/message_channel.h"
#include "comm/threads/run_ranks.h"
#include "runtime/runtime.h"
#include "runtime/session/session.h"
#include "tests/action_hook.h"

namespace smp::testing {
namespace {

using comm::Channels;
using comm::ChannelSpec;
using comm::CommunicatorPtr;

/// The delays and faults of a rank before its operations.
class Events {
 public:
  Events(const Chaos& chaos, CommunicatorPtr world, std::atomic<bool>& happened)
      : delays_(chaos.delays),
        fault_(chaos.fault && chaos.fault->rank == world->rank() ? chaos.fault : std::nullopt),
        world_(std::move(world)),
        happened_(happened),
        random_(chaos.seed * 1009 + static_cast<uint64_t>(world_->rank())) {}

  void pass() {
    const auto time = draw();
    if (time.count() > 0) std::this_thread::sleep_for(time);
    if (!fault_) return;
    const int64_t operation = operations_++;
    if (operation < fault_->operation) return;
    if (fault_->kind == RankFault::Kind::kDeath) {
      happened_ = true;
      throw SimulatedDeath("simulated death of rank " + std::to_string(fault_->rank) +
                           " before operation " + std::to_string(fault_->operation));
    }
    if (operation == fault_->operation) stall();
  }

 private:
  std::chrono::microseconds draw() {
    constexpr int kLong = 20000, kShort = 2000;  // us
    if (!delays_) return std::chrono::microseconds(0);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto kind = random_() % 400;
    if (kind == 0) return std::chrono::microseconds(kLong);
    return std::chrono::microseconds(kind % 3 == 0 ? random_() % kShort : 0);
  }

  void stall() {
    happened_ = true;
    while (world_->abort_text().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  const bool delays_;
  const std::optional<RankFault> fault_;
  const CommunicatorPtr world_;
  std::atomic<bool>& happened_;
  std::atomic<int64_t> operations_{0};
  std::mutex mutex_;
  std::mt19937_64 random_;
};

using EventsPtr = std::shared_ptr<Events>;

class DelayedWork final : public Work {
 public:
  DelayedWork(WorkPtr work, EventsPtr events)
      : work_(std::move(work)), events_(std::move(events)) {}

  bool test() override { return work_->test(); }
  void wait() override {
    events_->pass();
    work_->wait();
  }

 private:
  const WorkPtr work_;
  const EventsPtr events_;
};

class DelayedSender final : public comm::Sender {
 public:
  DelayedSender(std::unique_ptr<comm::Sender> sender, EventsPtr events)
      : sender_(std::move(sender)), events_(std::move(events)) {}

  void set_size(const comm::MessageSize& size) override { sender_->set_size(size); }
  const at::Tensor& prepare() override {
    events_->pass();
    return sender_->prepare();
  }
  at::Tensor device_part() override { return sender_->device_part(); }
  void send() override {
    events_->pass();
    sender_->send();
  }
  void flush() override {
    events_->pass();
    sender_->flush();
  }

 private:
  const std::unique_ptr<comm::Sender> sender_;
  const EventsPtr events_;
};

class DelayedReceiver final : public comm::Receiver {
 public:
  DelayedReceiver(std::unique_ptr<comm::Receiver> receiver, EventsPtr events)
      : receiver_(std::move(receiver)), events_(std::move(events)) {}

  void set_size(const comm::MessageSize& size) override { receiver_->set_size(size); }
  void expect(int messages) override { receiver_->expect(messages); }
  at::Tensor receive() override {
    events_->pass();
    return receiver_->receive();
  }
  at::Tensor device_part() override { return receiver_->device_part(); }

 private:
  const std::unique_ptr<comm::Receiver> receiver_;
  const EventsPtr events_;
};

class DelayedCommunicator final : public comm::Communicator {
 public:
  DelayedCommunicator(CommunicatorPtr communicator, EventsPtr events, ChannelKind channels)
      : communicator_(std::move(communicator)), events_(std::move(events)), channels_(channels) {}

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  const std::string& name() const override { return communicator_->name(); }

  WorkPtr isend(const at::Tensor& tensor, int destination, comm::Tag tag) override {
    events_->pass();
    return delayed(communicator_->isend(tensor, destination, tag));
  }
  WorkPtr irecv(const at::Tensor& tensor, int source, comm::Tag tag) override {
    events_->pass();
    return delayed(communicator_->irecv(tensor, source, tag));
  }
  comm::ReceiveWorkPtr irecv_from_any(const at::Tensor& tensor, comm::Tag tag) override {
    events_->pass();
    return communicator_->irecv_from_any(tensor, tag);
  }
  WorkPtr start(const comm::Collective& call) override {
    events_->pass();
    return delayed(communicator_->start(call));
  }
  WorkPtr start(at::Device device, comm::CollectiveTask task) override {
    events_->pass();
    return delayed(communicator_->start(device, std::move(task)));
  }
  at::Tensor shared_tensor(int64_t numel, at::ScalarType dtype) override {
    events_->pass();
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
      result.senders.push_back(std::make_unique<DelayedSender>(std::move(sender), events_));
    }
    for (auto& receiver : opened.receivers) {
      result.receivers.push_back(std::make_unique<DelayedReceiver>(std::move(receiver), events_));
    }
    return result;
  }

  CommunicatorPtr split(const std::vector<int>& members, const std::string& name) override {
    return std::make_shared<DelayedCommunicator>(communicator_->split(members, name), events_,
                                                 channels_);
  }
  void set_device_transport(const comm::DeviceTransport& transport) override {
    communicator_->set_device_transport(transport);
  }
  comm::DeviceTransport device_transport() const override {
    return communicator_->device_transport();
  }
  const std::shared_ptr<comm::WorldEnd>& world_end() const override {
    return communicator_->world_end();
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
    return std::make_shared<DelayedWork>(std::move(work), events_);
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
  const EventsPtr events_;
  const ChannelKind channels_;
};

}  // namespace

int64_t number_in(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::stoll(text);
}

void run_in_chaos(int ranks, const Config& config, const Chaos& chaos,
                  const std::function<void()>& program, bool* happened) {
  std::atomic<bool> did_happen{false};
  const auto say = c10::make_scope_exit([&] {
    if (happened != nullptr) *happened = did_happen;
  });
  comm::run_ranks(ranks, [&](const CommunicatorPtr& world) {
    const auto events = std::make_shared<Events>(chaos, world, did_happen);
    const std::vector<std::string> hosts(static_cast<size_t>(ranks), "threads");
    ActionHook hook([events](const pipeline::Action&) { events->pass(); });
    const auto runtime = runtime::start_runtime(
        config, std::make_shared<DelayedCommunicator>(world, events, chaos.channels), hosts);
    runtime->execution.messages_ahead = 1;
    runtime->execution.observers.push_back(&hook);
    const runtime::ThreadRuntime scope(runtime);
    program();
    // The barrier stands for `smp::shutdown`: a rank that has nothing left to ask of a stalling one
    // finds out here.
    world->barrier();
  });
}

}  // namespace smp::testing
