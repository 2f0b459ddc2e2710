// SPDX-License-Identifier: Apache-2.0
// Tests of a pool of channels over every back end.

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "comm/channel_pool.h"
#include "tests/comm/harness.h"
#include "tests/comm/test_tensors.h"

namespace smp::comm {
namespace {

using Ports = ChannelPool::Ports;

/// The channel of messages to or from a peer; the pool chooses the tag.
ChannelSpec to(int peer, int64_t bytes, int held = 1, int ahead = 2) {
  return {peer, /*tag=*/0, bytes, held, ahead};
}

at::Tensor content(int source, int number, int64_t bytes) {
  return at::full({bytes}, 1 + 16 * source + number, at::kByte);
}

/// Each rank has a pool with channels to the next rank and from the one before.
class PoolTest : public ::testing::TestWithParam<int> {
 protected:
  using Body = std::function<void(ChannelPool& pool, int next, int previous)>;

  static void on_ring(const Body& body) {
    on_every_rank(GetParam(), [&](const CommunicatorPtr& group) {
      const int size = group->size(), rank = group->rank();
      ChannelPool pool(group);
      body(pool, (rank + 1) % size, (rank + size - 1) % size);
      group->barrier();
    });
  }

  /// Sends `count` messages over each port and takes those that come.
  static std::vector<at::Tensor> exchange(const ChannelPool& pool, const Ports& ports, int count,
                                          int64_t bytes, int previous) {
    std::vector<at::Tensor> received;
    for (size_t port = 0; port < ports.outgoing.size(); ++port) {
      Sender& sender = *ports.outgoing[port]->sender;
      Receiver& receiver = *ports.incoming[port]->receiver;
      sender.set_size({bytes});
      receiver.set_size({bytes});
      receiver.expect(count);
      for (int number = 0; number < count; ++number) {
        sender.prepare().copy_(content(pool.group()->rank(), number, bytes));
        sender.send();
        received.push_back(receiver.receive());
        EXPECT_TRUE(same_bits(received.back(), content(previous, number, bytes)));
      }
      sender.flush();
    }
    return received;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, PoolTest, ::testing::ValuesIn(group_sizes()));

TEST_P(PoolTest, UsersShareChannelsUntilOneNeedsMore) {
  on_ring([](ChannelPool& pool, int next, int previous) {
    const auto open = [&](int64_t bytes, int held, int ahead) {
      return pool.open({to(next, bytes, held, ahead)}, {to(previous, bytes, held, ahead)});
    };
    const Ports first = open(1000, 2, 2);
    exchange(pool, first, 3, 1000, previous);
    const auto channel = [&] { return first.outgoing[0]->sender.get(); };
    const Sender* const before = channel();
    EXPECT_EQ(open(1000, 2, 2).outgoing, first.outgoing);
    EXPECT_EQ(open(10, 1, 1).outgoing, first.outgoing);
    EXPECT_EQ(channel(), before);
    exchange(pool, first, 3, 10, previous);

    struct Need {
      int64_t bytes;
      int held, ahead;
    };
    for (const Need& need : {Need{5000, 1, 1}, Need{10, 3, 1}, Need{10, 1, 3}}) {
      const Ports wider = open(need.bytes, need.held, need.ahead);
      EXPECT_EQ(wider.incoming, first.incoming);
      exchange(pool, wider, 3, need.bytes, previous);
    }
    const ChannelSpec& spec = first.incoming[0]->spec;
    EXPECT_EQ(spec.bytes, 5000);
    EXPECT_EQ(spec.held, 3);
    EXPECT_EQ(spec.ahead, 3);
    const Sender* const widest = channel();
    EXPECT_EQ(open(5000, 3, 3).outgoing, first.outgoing);
    EXPECT_EQ(channel(), widest);
    exchange(pool, first, 3, 5000, previous);
  });
}

/// Each part of a message may go another way.
TEST_P(PoolTest, ALaneHasRoomForTheLongestOfBothPartsOfMessages) {
  on_ring([](ChannelPool& pool, int next, int previous) {
    const auto open = [&](int64_t host_bytes, int64_t others) {
      ChannelSpec out = to(next, host_bytes + others), in = to(previous, host_bytes + others);
      out.host_bytes = in.host_bytes = host_bytes;
      return pool.open({out}, {in}).outgoing[0];
    };
    open(64, 1000);
    const ChannelPool::Port* const port = open(500, 100);
    EXPECT_EQ(port->spec.host_bytes, 500);
    EXPECT_EQ(port->spec.bytes, 1500);
    const Sender* const before = port->sender.get();
    EXPECT_EQ(open(64, 1000)->sender.get(), before);
  });
}

TEST_P(PoolTest, ChannelsThatAreUsedAtOneTimeAreApartAndTheLongestComeFirst) {
  on_ring([](ChannelPool& pool, int next, int previous) {
    const Ports two =
        pool.open({to(next, 100), to(next, 3000)}, {to(previous, 100), to(previous, 3000)});
    ASSERT_NE(two.outgoing[0], two.outgoing[1]);
    exchange(pool, two, 2, 100, previous);
    const Ports one = pool.open({to(next, 2000)}, {to(previous, 2000)});
    EXPECT_EQ(one.outgoing[0], two.outgoing[1]);
    EXPECT_EQ(one.incoming[0], two.incoming[1]);
    EXPECT_EQ(one.outgoing[0]->spec.bytes, 3000);
    exchange(pool, one, 2, 2000, previous);
    const Ports three = pool.open({to(next, 1), to(next, 50), to(next, 40)},
                                  {to(previous, 1), to(previous, 50), to(previous, 40)});
    EXPECT_EQ(three.outgoing[1], two.outgoing[1]);
    EXPECT_EQ(three.outgoing[2], two.outgoing[0]);
    exchange(pool, three, 2, 1, previous);
  });
}

TEST_P(PoolTest, WhatWasReceivedOutlivesTheChannel) {
  on_ring([](ChannelPool& pool, int next, int previous) {
    const auto open = [&](int64_t bytes) {
      return pool.open({to(next, bytes)}, {to(previous, bytes)});
    };
    std::vector<std::vector<at::Tensor>> kept;
    const std::vector<int64_t> sizes = {100, 300, 300, 200, 700};
    for (const int64_t bytes : sizes)
      kept.push_back(exchange(pool, open(bytes), 3, bytes, previous));
    for (size_t i = 0; i < sizes.size(); ++i) {
      for (int number = 0; number < 3; ++number) {
        EXPECT_TRUE(same_bits(kept[i][number], content(previous, number, sizes[i])));
      }
    }
  });
}

}  // namespace
}  // namespace smp::comm
