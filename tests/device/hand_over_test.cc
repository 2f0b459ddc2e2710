// SPDX-License-Identifier: Apache-2.0
// Channels between ranks that are threads of one process, on a device that does everything as late
// as it may.

#include "comm/hand_over.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <future>
#include <stdexcept>
#include <thread>

#include "comm/threads/run_ranks.h"
#include "core/check.h"
#include "graph/device_graph.h"
#include "pipeline/message.h"
#include "tests/device/fake_device.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

using comm::ChannelSpec;
using comm::CommunicatorPtr;

c10::Stream another_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

/// Messages of four numbers from rank 0 to rank 1.
class Link {
 public:
  Link(const CommunicatorPtr& world, at::Device device)
      : layout_({graph::TensorMeta::of(at::zeros({4}, at::TensorOptions(device)))}) {
    const ChannelSpec spec = {1 - world->rank(), 0,      layout_.nbytes(),      /*held=*/1,
                              /*ahead=*/4,       device, layout_.header_bytes()};
    ends_ =
        world->rank() == 0 ? world->open_channels({spec}, {}) : world->open_channels({}, {spec});
  }

  /// Returns where the elements are.
  const void* send(const at::Tensor& numbers) {
    comm::Sender& sender = *ends_.senders[0];
    const at::Tensor message = sender.prepare();
    EXPECT_EQ(message.numel(), layout_.header_bytes());
    const at::Tensor elements = sender.device_part();
    EXPECT_EQ(sender.prepare().const_data_ptr(), message.const_data_ptr());
    EXPECT_TRUE(sender.device_part().is_same(elements)) << "the same until it is sent";
    EXPECT_FALSE(layout_.begin_pack({numbers}, message, elements)) << "nothing to wait for";
    sender.send();
    return elements.const_data_ptr();
  }

  /// Returns the numbers and where the elements are.
  std::pair<at::Tensor, const void*> receive() {
    comm::Receiver& receiver = *ends_.receivers[0];
    receiver.expect(1);
    const at::Tensor message = receiver.receive();
    const at::Tensor elements = receiver.device_part();
    return {layout_.unpack(message, elements)[0], elements.const_data_ptr()};
  }

 private:
  const pipeline::MessageLayout layout_;
  comm::Channels ends_;
};

at::Tensor numbers(int first) { return at::arange(4.0).to(at::kFloat) + first; }

/// Numbers that the device of the current stream has yet to make.
at::Tensor late_numbers(int first, at::Device device) {
  const at::Tensor made = at::zeros({4}, device);
  made.add_(1);
  return made.mul_(numbers(first).to(device));
}

TEST(HandOver, ElementsStayWhereTheyAreOnOneStream) {
  const void* sent = nullptr;
  std::promise<void> is_sent;
  comm::run_ranks(2, [&](const CommunicatorPtr& world) {
    Link link(world, fake_device());
    if (world->rank() == 0) {
      const at::Tensor made = late_numbers(1, fake_device());
      {
        HostUses uses;  // one at a time
        sent = link.send(made);
        EXPECT_TRUE(uses.take(0).empty()) << "the host waits for the device";
      }
      is_sent.set_value();
      return;
    }
    is_sent.get_future().wait();
    HostUses uses;
    const auto [got, where] = link.receive();
    EXPECT_TRUE(uses.take(0).empty()) << "the host waits for the device";
    EXPECT_EQ(where, sent);
    EXPECT_TRUE(at::equal(got.cpu(), numbers(1)));
  });
}

/// The receiver's memory is its own: it may be written, and goes back when that stream says so.
TEST(HandOver, ElementsAreCopiedByTheReceiversStream) {
  comm::run_ranks(2, [&](const CommunicatorPtr& world) {
    const c10::StreamGuard guard(another_stream(fake_device()));
    Link link(world, fake_device());
    for (int i = 0; i < 6; ++i) {
      if (world->rank() == 0) {
        at::Tensor made = late_numbers(i, fake_device());
        link.send(made);
        made.zero_();
        made = at::Tensor();
      } else {
        auto [got, where] = link.receive();
        got.add_(10);
        EXPECT_TRUE(at::equal(got.cpu(), numbers(i + 10))) << i;
        got = at::Tensor();
      }
    }
  });
}

/// Neither the host nor the sender's computations wait for the receiver's computations.
TEST(HandOver, ElementsMoveToAnotherDeviceBesideComputations) {
  std::promise<void> is_received, is_known;
  comm::run_ranks(2, [&](const CommunicatorPtr& world) {
    const at::Device device = fake_device(world->rank());
    Link link(world, device);
    if (world->rank() == 0) {
      link.send(late_numbers(1, device));
      is_received.get_future().wait();
      const at::Tensor after = at::ones({4}, device);
      EXPECT_TRUE(at::equal(after.cpu(), at::ones({4})));
      is_known.set_value();
      return;
    }
    const at::Tensor earlier = at::zeros({4});
    earlier.copy_(at::ones({4}, device), /*non_blocking=*/true);
    const at::Tensor got = link.receive().first;
    EXPECT_EQ(got.device(), device);
    is_received.set_value();
    is_known.get_future().wait();
    EXPECT_FALSE(at::equal(earlier, at::ones({4}))) << "the sender's computations waited for it";
    EXPECT_TRUE(at::equal(got.cpu(), numbers(1)));
  });
}

/// A rank that shares the device captures meanwhile, on another thread.
TEST(HandOver, KeepsMemoryWhileAGraphIsCaptured) {
  graph::DeviceGraphCapture capture(fake_device());
  const at::Tensor x = at::ones({4}, fake_device());
  const auto work = capture.capture({}, [&] {
    comm::run_ranks(2, [&](const CommunicatorPtr& world) {
      const c10::StreamGuard guard(another_stream(fake_device()));
      Link link(world, fake_device());
      std::vector<at::Tensor> sums;
      for (int i = 0; i < 3; ++i) {
        if (world->rank() == 0) {
          link.send(numbers(i).to(fake_device()));
        } else {
          sums.push_back(link.receive().first + 1);
        }
      }
      for (size_t i = 0; i < sums.size(); ++i) {
        EXPECT_TRUE(at::equal(sums[i].cpu(), numbers(static_cast<int>(i) + 1))) << i;
      }
    });
    x.add_(1);
  });
}

/// Channels with one tag, one after the other, and messages of several lengths.
TEST(HandOver, ChannelsFollowEachOther) {
  comm::run_ranks(2, [&](const CommunicatorPtr& world) {
    const c10::StreamGuard guard(another_stream(fake_device()));
    for (int i = 0; i < 3; ++i) {
      Link link(world, fake_device());
      if (world->rank() == 0) {
        link.send(numbers(i).to(fake_device()));
      } else {
        EXPECT_TRUE(at::equal(link.receive().first.cpu(), numbers(i))) << i;
      }
    }
    const int64_t bytes = 256;
    const ChannelSpec spec = {1 - world->rank(), 3, bytes, 1, 2, fake_device(), 64};
    const bool sends = world->rank() == 0;
    const comm::Channels ends =
        sends ? world->open_channels({spec}, {}) : world->open_channels({}, {spec});
    for (const int64_t length : {256, 128, 192}) {
      const at::Tensor expected = at::full({length - 64}, length / 64, at::kByte);
      if (sends) {
        ends.senders[0]->set_size({length, 64});
        ends.senders[0]->prepare();
        ends.senders[0]->device_part().copy_(expected.to(fake_device()));
        ends.senders[0]->send();
      } else {
        ends.receivers[0]->set_size({length, 64});
        ends.receivers[0]->expect(1);
        EXPECT_EQ(ends.receivers[0]->receive().numel(), 64);
        EXPECT_TRUE(at::equal(ends.receivers[0]->device_part().cpu(), expected)) << length;
      }
    }
  });
}

TEST(HandOver, QueuesAreOfBothEndsInTheOrderInWhichTheyAreOpened) {
  comm::HandOverQueues shared;
  const comm::HandOverQueues::Channel one = {0, 0, 1, 7}, other = {0, 1, 0, 7};
  const auto first = shared.open(one, /*sends=*/true), second = shared.open(one, /*sends=*/true);
  EXPECT_NE(first, second);
  EXPECT_NE(shared.open(other, /*sends=*/false), first);
  EXPECT_EQ(shared.open(one, /*sends=*/false), first);
  EXPECT_EQ(shared.open(one, /*sends=*/false), second);
  const auto third = shared.open(one, /*sends=*/false);
  EXPECT_NE(third, second);
  EXPECT_EQ(shared.open(one, /*sends=*/true), third);
}

/// Messages that no rank takes any more are on their way, and are being copied.
TEST(HandOver, ARankMayFailMeanwhile) {
  for (const bool receiver_fails : {false, true}) {
    const auto text = error_of<std::runtime_error>([&] {
      comm::run_ranks(2, [&](const CommunicatorPtr& world) {
        const at::Device device = fake_device();
        const c10::StreamGuard guard(another_stream(device));
        Link link(world, device);
        if (world->rank() == 0) {
          for (int i = 0; i < 3; ++i) link.send(late_numbers(i, device));
          if (!receiver_fails) throw std::runtime_error("the cause");
          world->barrier();
        } else {
          const at::Tensor got = link.receive().first;
          got.add_(1);
          if (receiver_fails) throw std::runtime_error("the cause");
          link.receive();
          world->barrier();
        }
      });
    });
    EXPECT_EQ(text, "the cause");
  }
}

/// Each of two devices fails once in each of its kernels, among them the copy to the other.
TEST(HandOver, ADeviceMayFailMeanwhile) {
  const auto hand_over = [](const CommunicatorPtr& world) {
    const at::Device device = fake_device(world->rank());
    Link link(world, device);
    if (world->rank() == 0) {
      link.send(late_numbers(1, device));
    } else {
      EXPECT_TRUE(at::equal(link.receive().first.cpu(), numbers(1)));
    }
    world->barrier();
  };
  for (const int failing : {0, 1}) {
    int64_t kernels = 0;
    for (std::string text = "failed"; !text.empty(); ++kernels) {
      const FailingDevice device(failing, kernels);
      text = error_or_none<c10::Error>([&] { comm::run_ranks(2, hand_over); });
      if (!text.empty()) expect_has(text, "device-side assert triggered");
    }
    EXPECT_GT(kernels, 1) << "fake:" << failing;
  }
}

TEST(HandOver, PretendedHostsHandNothingOver) {
  const auto check = [](const CommunicatorPtr& world) {
    const ChannelSpec spec = {1 - world->rank(), 0, 128, 1, 2, fake_device(), 64};
    const comm::Channels ends = world->open_channels({spec}, {spec});
    EXPECT_EQ(ends.senders[0]->prepare().numel(), 128);
    EXPECT_FALSE(ends.senders[0]->device_part().defined());
  };
  comm::run_ranks(2, check, /*hosts=*/{0, 1});
}

}  // namespace
}  // namespace smp::testing
