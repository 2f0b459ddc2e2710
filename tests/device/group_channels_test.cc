// SPDX-License-Identifier: Apache-2.0
// The part of the channels over NCCL that needs no GPU, over a group that moves memory of the fake
// device.

#include "comm/nccl/group_channels.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "comm/nccl/reduce_parts.h"
#include "comm/reduce.h"
#include "comm/threads/thread_world.h"
#include "pipeline/message.h"
#include "tests/device/fake_device.h"

namespace smp::testing {
namespace {

using comm::ChannelSpec;

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// Ends when a stream has come to it.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(at::Device device, const c10::Stream& stream) : device_(device), done_(device.type()) {
    done_.record(stream);
  }
  bool isCompleted() override { return done_.query(); }
  bool wait(std::chrono::milliseconds) override {
    done_.block(current_stream(device_));
    return true;
  }

 private:
  const at::Device device_;
  c10::Event done_;
};

/// Ends when the receiver's stream has taken the elements.
class SentWork final : public c10d::Work {
 public:
  /// Null until they are received.
  using Taken = std::shared_ptr<c10::intrusive_ptr<c10d::Work>>;

  explicit SentWork(Taken taken) : taken_(std::move(taken)) {}
  bool isCompleted() override { return *taken_ != nullptr && (*taken_)->isCompleted(); }

 private:
  const Taken taken_;
};

/// Both ends of a group of two, in one thread, with the streams and events of libtorch's NCCL
/// group: a transfer waits for the current stream's work, on a stream of the group's own.
class FakeGroup final : public c10d::Backend {
 public:
  explicit FakeGroup(at::Device device)
      : Backend(0, 2),
        device_(device),
        stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int) override {
    EXPECT_EQ(peer, comm::kReceiverRank);
    const auto taken = std::make_shared<c10::intrusive_ptr<c10d::Work>>();
    sent_.emplace_back(tensors[0], taken);
    wait_for_current();
    return c10::make_intrusive<SentWork>(taken);
  }

  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int) override {
    EXPECT_EQ(peer, comm::kSenderRank);
    EXPECT_FALSE(sent_.empty()) << "a device that waits for a host";
    wait_for_current();
    const c10::StreamGuard guard(stream_);
    const auto [elements, taken] = sent_.front();
    sent_.pop_front();
    tensors[0].copy_(elements, /*non_blocking=*/true);
    *taken = c10::make_intrusive<StreamWork>(device_, stream_);
    return *taken;
  }

 private:
  void wait_for_current() {
    c10::Event given(device_.type());
    given.record(current_stream(device_));
    given.block(stream_);
  }

  const at::Device device_;
  const c10::Stream stream_;
  std::deque<std::pair<at::Tensor, SentWork::Taken>> sent_;
};

/// The host's channel of both ends.
struct HostChannel {
  explicit HostChannel(int64_t bytes) : memory(at::empty({bytes}, at::kByte)) {}
  at::Tensor memory;
  std::deque<at::Tensor> sent;
  int expected = 0;
};

class HostSender final : public comm::Sender {
 public:
  explicit HostSender(HostChannel& channel) : channel_(channel) {}
  void set_size(const comm::MessageSize& size) override {
    channel_.memory = at::empty({size.bytes}, at::kByte);
  }
  const at::Tensor& prepare() override { return channel_.memory; }
  void send() override { channel_.sent.push_back(channel_.memory.clone()); }
  void flush() override {}

 private:
  HostChannel& channel_;
};

class HostReceiver final : public comm::Receiver {
 public:
  explicit HostReceiver(HostChannel& channel) : channel_(channel) {}
  void set_size(const comm::MessageSize& size) override {
    EXPECT_EQ(channel_.memory.numel(), size.bytes);
  }
  void expect(int messages) override { channel_.expected += messages; }
  at::Tensor receive() override {
    const at::Tensor message = channel_.sent.front();
    channel_.sent.pop_front();
    return message;
  }

 private:
  HostChannel& channel_;
};

/// A channel of messages of four numbers on the device.
class GroupChannels : public ::testing::Test {
 protected:
  const at::Device device_ = fake_device();
  const pipeline::MessageLayout layout_{
      {graph::TensorMeta::of(at::zeros({4}, at::TensorOptions(device_)))}};
  const ChannelSpec spec_ = {1, 0, layout_.nbytes(), 1, 2, device_, layout_.header_bytes()};
  HostChannel host_{layout_.header_bytes()};
  const comm::DeviceGroup group_ = std::make_shared<FakeGroup>(device_);
  const std::shared_ptr<comm::GroupPool> pool_ =
      std::make_shared<comm::GroupPool>(comm::make_thread_world(1)[0], device_, nullptr);
  std::unique_ptr<comm::Sender> sender_ =
      comm::make_group_sender(std::make_unique<HostSender>(host_), group_, spec_, pool_);
  std::unique_ptr<comm::Receiver> receiver_ =
      comm::make_group_receiver(std::make_unique<HostReceiver>(host_), group_, spec_, pool_);

  void send(const at::Tensor& numbers) {
    const at::Tensor message = sender_->prepare();
    EXPECT_FALSE(layout_.begin_pack({numbers}, message, sender_->device_part()));
    sender_->send();
  }
  at::Tensor receive() {
    const at::Tensor message = receiver_->receive();
    return layout_.unpack(message, receiver_->device_part())[0];
  }
  at::Tensor numbers(int first) const { return (at::arange(4.0) + first).to(device_); }
};

TEST_F(GroupChannels, ElementsMoveInOrderWithoutTheHost) {
  receiver_->expect(3);
  EXPECT_EQ(host_.expected, 3);
  std::vector<at::Tensor> got;
  send(numbers(0));
  send(numbers(10));
  got.push_back(receive());
  send(numbers(20));
  got.push_back(receive());
  got.push_back(receive());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(got[i].device(), device_);
    EXPECT_TRUE(at::equal(got[i].cpu(), at::arange(4.0) + 10 * i)) << i;
  }
}

TEST_F(GroupChannels, MessagesMayBeShorterThanTheLongest) {
  for (const int64_t length : {4, 2, 3, 4}) {
    const at::Tensor numbers = (at::arange(length) + length).to(at::kFloat).to(device_);
    const pipeline::MessageLayout layout({graph::TensorMeta::of(numbers)});
    const comm::MessageSize size = {layout.nbytes(), layout.header_bytes()};
    sender_->set_size(size);
    receiver_->set_size(size);
    for (int i = 0; i < 3; ++i) {
      const at::Tensor message = sender_->prepare();
      EXPECT_EQ(sender_->device_part().numel(), size.bytes - size.host_bytes);
      EXPECT_FALSE(layout.begin_pack({numbers + i}, message, sender_->device_part()));
      sender_->send();
      const at::Tensor received = receiver_->receive();
      const at::Tensor got = layout.unpack(received, receiver_->device_part())[0];
      EXPECT_TRUE(at::equal(got.cpu(), at::arange(length).to(at::kFloat) + length + i));
    }
  }
}

TEST_F(GroupChannels, TheHostWaitsForNothing) {
  const at::Tensor made = numbers(0);
  take_fake_log();
  send(made);
  const at::Tensor got = receive();
  for (const std::string& line : take_fake_log()) {
    EXPECT_EQ(line.find("host"), std::string::npos) << line;
  }
  EXPECT_TRUE(at::equal(got.cpu(), at::arange(4.0)));
}

TEST_F(GroupChannels, SendsWhatTheDeviceHasYetToMakeAndReceivesBesideIt) {
  const at::Tensor made = at::zeros({4}, device_), host = at::arange(4.0);
  made.copy_(host, /*non_blocking=*/true);  // not done when it is sent
  send(made);
  take_fake_log();
  const at::Tensor got = receive();
  const auto log = take_fake_log();
  ASSERT_FALSE(log.empty());
  EXPECT_EQ(log.front(), "copy records event 0") << "not behind the computations";
  EXPECT_EQ(log.back(), "compute records event 2") << "behind its copy of what arrived";
  EXPECT_TRUE(at::equal(got.cpu(), host));
}

TEST_F(GroupChannels, MemoryIsSentFromAgainWhenItHasLeft) {
  send(numbers(0));
  sender_->prepare();
  const void* second = sender_->device_part().const_data_ptr();
  EXPECT_EQ(sender_->prepare().const_data_ptr(), host_.memory.const_data_ptr());
  EXPECT_EQ(sender_->device_part().const_data_ptr(), second) << "the same until it is sent";
  const at::Tensor got = receive();
  EXPECT_TRUE(at::equal(got.cpu(), at::arange(4.0)));
  send(numbers(1));
  EXPECT_TRUE(at::equal(receive().cpu(), at::arange(4.0) + 1));  // waits until both have left
  std::set<const void*> memory;
  for (int i = 0; i < 6; ++i) {
    sender_->prepare();
    memory.insert(sender_->device_part().const_data_ptr());
    send(numbers(i));
    EXPECT_TRUE(at::equal(receive().cpu(), at::arange(4.0) + i)) << i;
  }
  EXPECT_EQ(memory.size(), 2u);
}

TEST(GroupChannelSpecs, OnlyTheFirstBytesOfADevicesMessagesGoThroughTheHost) {
  const ChannelSpec device = {1, 0, 256, 1, 2, fake_device(), 64};
  const ChannelSpec empty = {1, 1, 64, 1, 2, fake_device(), 64};
  const ChannelSpec host = {1, 2, 256, 3, 2, at::kCPU, 64};
  EXPECT_TRUE(comm::moves_on_device(device));
  EXPECT_FALSE(comm::moves_on_device(empty)) << "has no elements";
  EXPECT_FALSE(comm::moves_on_device(host));
  EXPECT_EQ(comm::host_part(device).bytes, 64);
  EXPECT_EQ(comm::host_part(device).device, at::kCPU);
  EXPECT_EQ(comm::host_part(empty).device, fake_device());
  EXPECT_EQ(comm::host_part(host).bytes, 256);
}

/// Lets ranks connect, each in its order, two whenever both have come to the same channel.
bool all_connect(const std::vector<std::vector<std::array<int, 3>>>& orders) {
  std::vector<size_t> at(orders.size(), 0);
  const auto left = [&](size_t rank) { return at[rank] < orders[rank].size(); };
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t a = 0; a < orders.size(); ++a) {
      for (size_t b = a + 1; b < orders.size(); ++b) {
        if (!left(a) || !left(b) || orders[a][at[a]] != orders[b][at[b]]) continue;
        ++at[a], ++at[b];
        moved = true;
      }
    }
  }
  for (size_t rank = 0; rank < orders.size(); ++rank) {
    if (left(rank)) return false;
  }
  return true;
}

TEST(GroupChannelSpecs, RanksConnectWithoutWaitingInACircle) {
  constexpr int kRanks = 5;
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::vector<ChannelSpec>> outgoing(kRanks), incoming(kRanks);
    std::vector<std::array<int, 3>> channels;  // tag, sender, receiver
    for (int i = 0; i < 12; ++i) {
      const int sender = random() % kRanks, step = 1 + random() % (kRanks - 1);
      channels.push_back({static_cast<int>(random() % 4), sender, (sender + step) % kRanks});
    }
    for (const int end : {0, 1}) {  // ranks list their ends in orders of their own
      std::shuffle(channels.begin(), channels.end(), random);
      for (const auto& [tag, sender, receiver] : channels) {
        auto& specs = end == 0 ? outgoing[sender] : incoming[receiver];
        specs.push_back({end == 0 ? receiver : sender, tag, 256, 1, 2, fake_device(), 64});
      }
    }
    std::vector<std::vector<std::array<int, 3>>> orders(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      for (const auto& end : comm::connection_order(rank, outgoing[rank], incoming[rank])) {
        const ChannelSpec& spec = end.sends ? outgoing[rank][end.index] : incoming[rank][end.index];
        orders[rank].push_back(end.sends ? std::array<int, 3>{spec.tag, rank, spec.peer}
                                         : std::array<int, 3>{spec.tag, spec.peer, rank});
      }
      EXPECT_EQ(orders[rank].size(), outgoing[rank].size() + incoming[rank].size());
    }
    EXPECT_TRUE(all_connect(orders)) << "round " << round;
  }
}

TEST(ReduceParts, HasTheBitsOfTheHostsReduction) {
  at::manual_seed(3);
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,
                                    at::kShort, at::kByte, at::kBool, at::kComplexFloat}) {
    const at::Tensor parts = (at::randn({4, 33}) * 1000).to(type);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax}) {
      if (!comm::can_reduce(type, op)) continue;
      at::Tensor expected = at::empty({33}, parts.options());
      std::vector<const void*> rows;
      for (int i = 0; i < 4; ++i) rows.push_back(parts[i].const_data_ptr());
      comm::reduce_in_order({expected.mutable_data_ptr()}, rows, 33, type, op, 4);
      const at::Tensor got = comm::reduce_parts(parts.to(fake_device()).unbind(0), op);
      EXPECT_EQ(got.device(), fake_device());
      EXPECT_TRUE(at::equal(got.cpu(), expected)) << type << " " << static_cast<int>(op);
    }
  }
}

/// CUDA multiplies by the reciprocal of a divisor that the host has, and so rounds twice.
TEST(ReduceParts, DividesByANumberOfTheDevice) {
  static std::set<std::string> divisions;
  divisions.clear();
  const auto note = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
    const auto name = call.operator_name();
    if (name && name->name == "aten::div") divisions.insert(name->overload_name);
    return nullptr;
  };
  const std::vector<at::Tensor> parts(3, at::ones({4}, fake_device()));
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(note));
  const at::Tensor got = comm::reduce_parts(parts, ReduceOp::kAverage);
  at::removeCallback(handle);
  EXPECT_TRUE(at::equal(got.cpu(), at::ones({4})));
  EXPECT_EQ(divisions.count("Tensor"), 1);
  EXPECT_EQ(divisions.count("Scalar"), 0);
}

}  // namespace
}  // namespace smp::testing
