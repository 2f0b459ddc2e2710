// SPDX-License-Identifier: Apache-2.0
// The communicator over NCCL, without NCCL: over groups of rank threads that count their messages.

#include "comm/nccl/group_communicator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/channel_pool.h"
#include "comm/nccl/group_pool.h"
#include "comm/nccl/group_store.h"
#include "comm/reduce.h"
#include "comm/threads/run_ranks.h"
#include "core/check.h"
#include "pipeline/message.h"
#include "tests/device/fake_device.h"
#include "tests/device/fake_groups.h"
#include "tests/error_of.h"

namespace smp::testing {
namespace {

using comm::Communicator;
using comm::CommunicatorPtr;

at::Device device_of(int rank) { return fake_device(rank % 4); }

/// Ranks whose devices are connected by a network.
struct Ranks {
  int count;
  bool fast = false;
  FakeNetwork network = {};

  /// Runs `check` on each, with the host's communicator and the device's.
  void run(const std::function<void(Communicator& host, Communicator& group)>& check) {
    comm::run_ranks(count, [&](const CommunicatorPtr& world) {
      world->set_device_transport({/*only_nccl=*/false, fast});
      const auto group = comm::make_group_communicator(world, device_of(world->rank()),
                                                       network.groups(world->rank()));
      check(*world, *group);
    });
  }
};

at::Tensor values_of(int rank, int64_t numel, at::ScalarType type) {
  const auto values = (at::arange(numel).to(at::kDouble) + 1) * (rank + 1) / 7;
  return type == at::kBool ? values.to(at::kLong).remainder(2).to(type) : values.to(type);
}

/// All collectives, the same on a group's tensors of `device`.
std::vector<at::Tensor> results_of(Communicator& group, at::Device device, int64_t numel,
                                   at::ScalarType type, ReduceOp op) {
  const int rank = group.rank(), size = group.size(), root = size - 1;
  const auto given = [&](int64_t count) { return values_of(rank, count, type).to(device); };
  const auto room = [&](int64_t count) { return at::zeros({count}, given(1).options()); };
  std::vector<at::Tensor> results;
  if (comm::can_reduce(type, op)) {
    results.push_back(given(numel));
    group.all_reduce(results.back(), op);
    results.push_back(given(numel));
    group.reduce(results.back(), root, op);
    results.push_back(room(numel));
    group.reduce_scatter(results.back(), given(numel * size), op);
  }
  results.push_back(given(numel));
  group.broadcast(results.back(), root);
  results.push_back(room(numel * size));
  group.all_gather(results.back(), given(numel));
  results.push_back(room(numel * size));
  group.all_to_all(results.back(), {}, given(numel * size), {});
  results.push_back(room(rank == root ? numel * size : 0));
  group.gather(results.back(), given(numel), root);
  results.push_back(room(numel));
  group.scatter(results.back(), given(rank == root ? numel * size : 0), root);
  return results;
}

TEST(GroupCommunicator, ExactCollectivesHaveTheHostsBits) {
  for (const int count : {2, 3}) {
    Ranks ranks{count};
    ranks.run([](Communicator& host, Communicator& group) {
      const at::Device device = device_of(host.rank());
      for (const at::ScalarType type :
           {at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kShort, at::kBool}) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax}) {
          for (const int64_t numel : {1, 7, 96}) {
            const auto expected = results_of(host, at::kCPU, numel, type, op);
            const auto got = results_of(group, device, numel, type, op);
            for (size_t i = 0; i < expected.size(); ++i) {
              EXPECT_EQ(got[i].device(), device);
              EXPECT_TRUE(at::equal(got[i].cpu(), expected[i]))
                  << "result " << i << " of " << numel << " x " << type << ", " << to_string(op);
            }
          }
        }
      }
    });
  }
}

TEST(GroupCommunicator, FastReductionsAreTheGroupsOwn) {
  Ranks ranks{3, /*fast=*/true};
  std::vector<at::Tensor> sums(3);
  ranks.run([&](Communicator& host, Communicator& group) {
    const at::Device device = device_of(host.rank());
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      const auto expected = results_of(host, at::kCPU, 96, at::kFloat, op);
      const auto got = results_of(group, device, 96, at::kFloat, op);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(at::allclose(got[i].cpu(), expected[i])) << i << ", " << to_string(op);
      }
    }
    sums[host.rank()] = values_of(host.rank(), 1000, at::kFloat).to(device);
    group.all_reduce(sums[host.rank()]);
    sums[host.rank()] = sums[host.rank()].cpu();
    const at::Tensor in_order = values_of(host.rank(), 1000, at::kFloat);
    host.all_reduce(in_order);
    EXPECT_FALSE(at::equal(sums[host.rank()], in_order)) << "added in rank order";
  });
  EXPECT_TRUE(at::equal(sums[0], sums[1]) && at::equal(sums[0], sums[2]));
}

/// NCCL has no integers of 16 bits and no operators on bits, and its maximum loses NaN.
TEST(GroupCommunicator, OtherFastReductionsAreExact) {
  Ranks ranks{2, /*fast=*/true};
  ranks.run([](Communicator& host, Communicator& group) {
    const at::Device device = device_of(host.rank());
    const at::Tensor some = values_of(host.rank(), 4, at::kFloat).to(device);
    if (host.rank() == 1) some[2].fill_(std::nan(""));
    group.all_reduce(some, ReduceOp::kMax);
    EXPECT_TRUE(at::equal(some.isnan().cpu(), at::tensor({0, 0, 1, 0}).to(at::kBool)));
    for (const auto& [type, op] :
         {std::pair{at::kShort, ReduceOp::kSum}, std::pair{at::kLong, ReduceOp::kBitOr}}) {
      const at::Tensor expected = values_of(host.rank(), 96, type), got = expected.to(device);
      host.all_reduce(expected, op);
      group.all_reduce(got, op);
      EXPECT_TRUE(at::equal(got.cpu(), expected)) << type;
    }
  });
}

/// S bytes on n ranks, of each rank.
TEST(GroupCommunicator, SendsAsManyBytesAndMessagesAsTheFormulasSay) {
  constexpr int64_t kNumel = 24 * 5;  // divisible by all n
  for (const bool fast : {false, true}) {
    for (const int n : {2, 3, 4}) {
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        Ranks ranks{n, fast};
        ranks.run([&](Communicator& host, Communicator& group) {
          const int rank = host.rank();
          const at::Tensor values = values_of(rank, kNumel, type).to(device_of(rank));
          const at::Tensor part = values.narrow(0, 0, kNumel / n).clone();
          const auto bytes = static_cast<int64_t>(values.nbytes());
          const auto expect_sent = [&](int64_t messages, int64_t expected, const char* what) {
            const Traffic sent = ranks.network.take_sent(rank);
            EXPECT_EQ(sent.messages, messages)
                << what << (fast ? " fast" : " exact") << ", n " << n;
            EXPECT_EQ(sent.bytes, expected) << what << (fast ? " fast" : " exact") << ", n " << n;
          };
          ranks.network.take_sent(rank);
          group.all_reduce(values);
          expect_sent(2 * (n - 1), 2 * (n - 1) * bytes / n, "all_reduce");
          group.reduce_scatter(part, values);
          expect_sent(n - 1, (n - 1) * bytes / n, "reduce_scatter");
          group.all_gather(values, part);
          expect_sent(n - 1, (n - 1) * bytes / n, "all_gather");
          group.reduce(values, 0);
          if (fast) {  // around the ring to the root
            expect_sent(rank > 0, rank > 0 ? bytes : 0, "reduce");
          } else {  // slices to all, sums to the root
            expect_sent(n - 1 + (rank > 0), (n - 1 + (rank > 0)) * bytes / n, "reduce");
          }
          group.broadcast(values, 0);
          expect_sent(rank < n - 1, rank < n - 1 ? bytes : 0, "broadcast");
        });
      }
    }
  }
}

/// Without the last elements of the ranks' slices.
TEST(GroupCommunicator, ExactReductionsFillSlicesUp) {
  Ranks ranks{4};
  ranks.run([&](Communicator& host, Communicator& group) {
    const at::Tensor values = values_of(host.rank(), 10, at::kFloat).to(device_of(host.rank()));
    group.all_reduce(values);
    EXPECT_EQ(ranks.network.take_sent(host.rank()).bytes, 2 * 3 * 3 * 4);  // three elements
  });
}

TEST(GroupCommunicator, MakesGroupsWhenTheyAreUsed) {
  Ranks ranks{2};
  ranks.run([&](Communicator& host, Communicator& group) {
    const at::Tensor values = at::ones({4}, device_of(host.rank()));
    EXPECT_TRUE(ranks.network.made(host.rank()).empty());
    group.all_reduce(values);
    group.broadcast(values, 1);
    EXPECT_EQ(ranks.network.made(host.rank()), std::vector<std::string>{"all"});
    EXPECT_TRUE(ranks.network.ports(host.rank()).empty());
  });
}

TEST(GroupCommunicator, MessagesAreReceivedByTagInAnyOrderThroughTheHost) {
  Ranks ranks{2};
  ranks.run([&](Communicator& host, Communicator& group) {
    const at::Device device = device_of(host.rank());
    const int other = 1 - host.rank();
    const auto first = group.isend(at::full({4}, 1.0, device), other, /*tag=*/1);
    const auto second = group.isend(at::full({2}, 2.0, device), other, /*tag=*/2);
    const at::Tensor got_second = at::zeros({2}, device), got_first = at::zeros({4}, device);
    group.recv(got_second, other, 2);
    group.recv(got_first, other, 1);
    first->wait();
    second->wait();
    EXPECT_TRUE(at::equal(got_first.cpu(), at::ones({4})));
    EXPECT_TRUE(at::equal(got_second.cpu(), at::full({2}, 2.0)));
    EXPECT_TRUE(ranks.network.made(host.rank()).empty());
  });
}

/// Two programs of which the second has longer messages, and an edge more; on two hosts.
TEST(GroupCommunicator, ProgramsShareTheGroupsOfLanes) {
  Ranks ranks{2};
  const auto program = [&](const CommunicatorPtr& world) {
    const int rank = world->rank();
    const at::Device device = device_of(rank);
    comm::ChannelPool pool(
        comm::make_group_communicator(world, device, ranks.network.groups(rank)));
    for (const int64_t length : {4, 16, 4}) {
      const at::Tensor values = at::arange(length).to(at::kFloat).to(device);
      const pipeline::MessageLayout layout({graph::TensorMeta::of(values)});
      const comm::ChannelSpec spec = {1 - rank, 0,      layout.nbytes(),      1,
                                      2,        device, layout.header_bytes()};
      const std::vector<comm::ChannelSpec> specs(length == 16 ? 2 : 1, spec);
      const auto ports = pool.open(specs, specs);
      for (comm::ChannelPool::Port* port : ports.outgoing) {
        port->sender->set_size({layout.nbytes(), layout.header_bytes()});
        const at::Tensor message = port->sender->prepare();
        EXPECT_FALSE(layout.begin_pack({values}, message, port->sender->device_part()));
        port->sender->send();
      }
      for (comm::ChannelPool::Port* port : ports.incoming) {
        port->receiver->set_size({layout.nbytes(), layout.header_bytes()});
        port->receiver->expect(1);
        const at::Tensor message = port->receiver->receive();
        const at::Tensor got = layout.unpack(message, port->receiver->device_part())[0];
        EXPECT_TRUE(at::equal(got.cpu(), at::arange(length).to(at::kFloat)));
      }
    }
  };
  comm::run_ranks(2, program, /*hosts=*/{0, 1});
  EXPECT_EQ(ranks.network.made(0).size(), 4u) << "two ports, each from and to the other";
  EXPECT_EQ(ranks.network.made(0), ranks.network.made(1)) << "connected in one order";
  EXPECT_EQ(ranks.network.ports(0), ranks.network.made(0)) << "so they take little of the device";
}

TEST(GroupCommunicator, ThreadsOfOneProcessNeedNoLanes) {
  Ranks ranks{2};
  ranks.run([&](Communicator& host, Communicator& group) {
    const int rank = host.rank();
    const comm::ChannelSpec spec = {1 - rank, 0, 192, 1, 2, device_of(rank), 64};
    const comm::Channels channels = group.open_channels({spec}, {spec});
    channels.senders[0]->prepare();
    channels.senders[0]->device_part().fill_(rank + 1);
    channels.senders[0]->send();
    channels.receivers[0]->expect(1);
    channels.receivers[0]->receive();
    const at::Tensor got = channels.receivers[0]->device_part();
    EXPECT_EQ(got.device(), device_of(rank));
    EXPECT_TRUE(at::equal(got.cpu(), at::full({128}, 2 - rank, at::kByte)));
    EXPECT_TRUE(ranks.network.made(rank).empty());
  });
}

/// It, and the tensors that it has, are dropped while a device still moves them: the next work of
/// the caller's stream gets their memory.
TEST(GroupCommunicator, WorkThatNobodyWaitsForKeepsItsTensors) {
  Ranks ranks{2};
  ranks.run([&](Communicator& host, Communicator& group) {
    const at::Device device = device_of(host.rank());
    const at::Tensor values = at::full({96}, host.rank() + 1, device);
    group.async().all_reduce(at::full({96}, 5, device));
    group.all_reduce(values);
    EXPECT_TRUE(at::equal(values.cpu(), at::full({96}, 3)));
  });
}

/// The others' devices wait for a rank that will never come.
TEST(GroupCommunicator, ARankThatFailsEndsTheOthersGroups) {
  Ranks ranks{3};
  ranks.run([&](Communicator& host, Communicator& group) {
    if (host.rank() == 1) {
      ranks.network.await_waiting(2);
      host.abort("disk full");
      return;
    }
    const at::Tensor values = at::ones({12}, device_of(host.rank()));
    expect_has(error_of<c10::Error>([&] { group.all_reduce(values); }), {"was aborted"});
    const auto text = error_of<CommError>([&] { group.all_reduce(values); });
    expect_has(text, {"the device groups of group 'world' were ended when a rank failed: rank 1 "
                      "failed: disk full"});
  });
}

/// A transfer of a device that has failed, which says so at each question.
class FailedWork final : public c10d::Work {
 public:
  bool isCompleted() override { TORCH_CHECK(false, "the device has failed"); }
};

TEST(GroupPool, LetsGoOfTransfersOfADeviceThatHasFailed) {
  comm::run_ranks(1, [](const CommunicatorPtr& world) {
    const auto made = std::make_shared<FakeNetwork>();
    comm::GroupPool pool(world, fake_device(), made->groups(0));
    at::Tensor tensor = at::ones({4});
    const auto memory = tensor.storage().getWeakStorageImpl();
    pool.keep({c10::make_intrusive<FailedWork>(), std::move(tensor)});
    EXPECT_FALSE(memory.expired());
    pool.keep({c10::make_intrusive<FailedWork>(), at::ones({4})});
    EXPECT_TRUE(memory.expired());
  });
}

TEST(LetFinish, AsksUntilItHas) {
  int asked = 0;
  comm::let_finish([&asked] { return ++asked == 3; }, std::chrono::hours(1));
  EXPECT_EQ(asked, 3);
}

TEST(LetFinish, EndsWhereTheDeviceHasFailed) {
  int asked = 0;
  const auto fails = [&asked]() -> bool {
    ++asked;
    TORCH_CHECK(false, "the device has failed");
  };
  comm::let_finish(fails, std::chrono::hours(1));
  EXPECT_EQ(asked, 1);
}

TEST(GroupStore, IsWhereRanksMeet) {
  comm::run_ranks(3, [](const CommunicatorPtr& world) {
    const auto store = comm::make_group_store(*world);
    if (world->rank() == 0) store->set("id", std::string("abc"));
    const auto got = store->get("id");
    EXPECT_EQ(std::string(got.begin(), got.end()), "abc");
    world->barrier();  // rank 0 has the store
  });
}

}  // namespace
}  // namespace smp::testing
