// SPDX-License-Identifier: Apache-2.0
// Groups whose ranks pretend to be on several hosts: the bits are those of one host, and no more
// goes from host to host than must.

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "comm/call.h"
#include "comm/threads/run_ranks.h"
#include "comm/threads/thread_world.h"
#include "comm/transport_communicator.h"
#include "core/check.h"
#include "core/public_call.h"
#include "tests/comm/test_tensors.h"

namespace smp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class OneIntraOpThread : public ::testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};
const auto* const kOneIntraOpThread = ::testing::AddGlobalTestEnvironment(new OneIntraOpThread);

using Hosts = std::vector<int>;

void on_hosts(const Hosts& hosts, const std::function<void(const CommunicatorPtr&)>& body) {
  run_ranks(
      static_cast<int>(hosts.size()),
      [&](const CommunicatorPtr& world) {
        world->set_timeout(std::chrono::seconds(30));
        body(world);
      },
      hosts);
}

class Layouts : public ::testing::TestWithParam<Hosts> {};
INSTANTIATE_TEST_SUITE_P(Hosts, Layouts,
                         ::testing::Values(Hosts{0, 0, 1, 1}, Hosts{0, 1, 1}, Hosts{0, 0, 0, 1},
                                           Hosts{0, 0, 1, 1, 2}, Hosts{0, 1, 2}, Hosts{0, 1, 0, 1},
                                           Hosts{0, 0, 1, 0}));

// Sizes below and above the least for the chain, and more than all its buffers hold, which is the
// same for all types.
TEST_P(Layouts, AllReduceHasTheBitsOfTheSumInRankOrder) {
  on_hosts(GetParam(), [](const CommunicatorPtr& world) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kLong}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax}) {
        if (!is_defined(dtype, op)) {
          continue;
        }
        const bool fills_buffers = dtype == at::kFloat || op == ReduceOp::kSum;
        for (const int64_t elements : {7, 65'537, fills_buffers ? 1'000'003 : 1'003}) {
          const auto parts = values_of_all(world->size(), elements, dtype);
          const at::Tensor tensor = parts[world->rank()].clone();
          world->all_reduce(tensor, op);
          EXPECT_TRUE(same_bits(tensor, reduce_by_hand(parts, op)))
              << to_string(op) << " of " << elements << " x " << dtype;
        }
      }
    }
  });
}

TEST_P(Layouts, TheOtherCollectivesWorkToo) {
  on_hosts(GetParam(), [](const CommunicatorPtr& world) {
    const int size = world->size(), rank = world->rank();
    for (const int64_t elements : {5, 100'000}) {
      const auto parts = values_of_all(size, elements * size, at::kFloat);
      const at::Tensor sum = reduce_by_hand(parts, ReduceOp::kSum);
      const at::Tensor own = at::empty({elements});
      world->reduce_scatter(own, parts[rank]);
      EXPECT_TRUE(same_bits(own, sum.narrow(0, rank * elements, elements)));
      const at::Tensor all = at::empty({elements * size});
      world->all_gather(all, own);
      EXPECT_TRUE(same_bits(all, sum));
      const at::Tensor tensor = parts[rank].clone();
      world->reduce(tensor, size - 1);
      EXPECT_TRUE(same_bits(tensor, rank == size - 1 ? sum : parts[rank]));
      world->broadcast(tensor, size - 1);
      EXPECT_TRUE(same_bits(tensor, sum));
      world->barrier();
    }
  });
}

TEST_P(Layouts, SharedTensorsAndOutstandingOnes) {
  on_hosts(GetParam(), [](const CommunicatorPtr& world) {
    const at::Tensor shared = world->shared_tensor(50'000, at::kFloat);
    const at::Tensor ordinary = at::ones({50'000});
    shared.fill_(1);
    std::vector<WorkPtr> works;
    for (int i = 0; i < 3; ++i) {
      works.push_back(world->async().all_reduce(shared, ReduceOp::kSum));
      works.push_back(world->async().all_reduce(ordinary, ReduceOp::kSum));
    }
    for (const WorkPtr& work : works) {
      work->wait();
    }
    const auto expected = static_cast<float>(world->size() * world->size() * world->size());
    EXPECT_TRUE(same_bits(shared, at::full({50'000}, expected)));
    EXPECT_TRUE(same_bits(ordinary, at::full({50'000}, expected)));
  });
}

// Between hosts it costs messages, and is done when asked for.
TEST_P(Layouts, CallsAreComparedOnRequest) {
  on_hosts(GetParam(), [](const CommunicatorPtr& world) {
    world->check_collectives(true);
    const bool last = world->rank() == world->size() - 1;
    EXPECT_THAT(error_of<CommError>([&] {
                  if (last) {
                    world->barrier();
                  } else {
                    world->all_reduce(at::ones({100'000}));
                  }
                }),
                HasSubstr(c10::str("does not match the other ranks' calls: rank 0 called "
                                   "all_reduce (sum) of 100000 x Float")));
    const at::Tensor tensor = at::ones({100'000});
    world->all_reduce(tensor);
    EXPECT_TRUE(same_bits(tensor, at::full({100'000}, static_cast<float>(world->size()))));
  });
}

// The errors of a world whose last rank makes another call than the others.
std::string mismatch_of(const Hosts& hosts,
                        const std::function<void(Communicator& world, bool is_last)>& call) {
  return error_of<CommError>([&] {
    on_hosts(hosts, [&](const CommunicatorPtr& world) {
      world->barrier();  // sets up
      call(*world, world->rank() == world->size() - 1);
    });
  });
}

// Messages between hosts begin with the call, so that those that are of one size are not taken for
// each other.
TEST_P(Layouts, CallsThatMeetInMessagesAreCompared) {
  const int last = static_cast<int>(GetParam().size()) - 1;
  const auto is_in = [&](const std::string& what) {
    return HasSubstr(c10::str("rank ", last, " ", what));
  };
  const int64_t parts = last + 1;
  for (const int64_t elements : {5, 1'000'000}) {
    SCOPED_TRACE(elements);
    const auto saves = [&](Communicator& world, bool is_last) {
      const core::PublicCallScope here(
          is_last ? core::PublicCall("smp::save", "smp::save")
                  : core::PublicCall("call 4 of step function \"train\"", core::kAnyStep));
      world.all_reduce(at::ones({elements}));
    };
    EXPECT_THAT(mismatch_of(GetParam(), saves),
                AllOf(HasSubstr(" does not match the other ranks' calls: rank "),
                      HasSubstr(" is in call 4 of step function \"train\", "),
                      is_in("is in smp::save. All ranks must make the same calls")));
  }
  const auto gathers = [&](Communicator& world, bool is_last) {
    if (is_last) {
      world.all_gather(at::ones({parts}), at::ones({1}));
    } else {
      world.all_reduce(at::ones({parts}));
    }
  };
  EXPECT_THAT(mismatch_of(GetParam(), gathers),
              AllOf(HasSubstr(c10::str(" called all_reduce (sum) of ", parts, " x Float, ")),
                    is_in("called all_gather of 1 x Float.")));
  const auto comes_to_a_barrier = [&](Communicator& world, bool is_last) {
    if (is_last) {
      world.barrier();
    } else {
      world.all_gather(at::ones({parts}), at::ones({1}));
    }
  };
  EXPECT_THAT(mismatch_of(GetParam(), comes_to_a_barrier),
              AllOf(HasSubstr(" called all_gather of 1 x Float, "), is_in("called barrier.")));
}

// The ranks of the second host give up while they wait for sums of the first, whose ranks then come
// and send them: that must not reach memory which others have by then.
TEST(Failures, SumsThatComeTooLateAreWrittenIntoNobodysMemory) {
  constexpr auto kPattern = std::byte{0x5a};
  constexpr int64_t kElements = 64 << 10;
  const std::vector<std::byte> like_a_buffer(32 << 10, kPattern);  // a chunk of a lane
  std::atomic<int> gave_up{0}, came{0};
  const auto await_both = [](const std::atomic<int>& count) {
    while (count < 2) std::this_thread::yield();
  };
  on_hosts({0, 0, 1, 1}, [&](const CommunicatorPtr& world) {
    world->barrier();  // sets up
    world->set_timeout(std::chrono::milliseconds(200));
    const auto all_reduce = [&] { world->all_reduce(at::ones({kElements})); };
    if (world->rank() < 2) {
      await_both(gave_up);
      EXPECT_THAT(error_of<TimeoutError>(all_reduce), HasSubstr("it waits for rank"));
      ++came;
      return;
    }
    EXPECT_THAT(error_of<TimeoutError>(all_reduce), HasSubstr("it waits for rank"));
    const std::vector<std::vector<std::byte>> others(16, like_a_buffer);
    ++gave_up;
    await_both(came);
    EXPECT_THAT(others, ::testing::Each(like_a_buffer));
  });
}

// Counts its rank's messages to other hosts, beside its calls.
class CountingTransport final : public Transport {
 public:
  CountingTransport(std::shared_ptr<ThreadWorld> world, Hosts hosts)
      : world_(std::move(world)), hosts_(std::move(hosts)) {}

  void start(PendingMessage transfer) override {
    const GroupState& group = transfer.group();
    if (transfer.message.direction == Message::Direction::kSend &&
        transfer.message.bytes != sizeof(Call) &&
        hosts_[group.rank] != hosts_[transfer.message.peer]) {
      sent_ += static_cast<int64_t>(transfer.message.bytes);
    }
    world_->start(std::move(transfer));
  }
  void poll() override { world_->poll(); }
  bool wait_until(Clock::time_point deadline, const std::function<bool()>& ready) override {
    return world_->wait_until(deadline, ready);
  }
  void notify() override { world_->notify(); }
  int make_context(const GroupState& parent, int first_member) override {
    return world_->make_context(parent, first_member);
  }
  bool shares_memory(int this_rank, int other) const override {
    return world_->shares_memory(this_rank, other);
  }
  bool has_core_for_each_rank() const override { return world_->has_core_for_each_rank(); }
  void abort(int rank, const std::string& reason) noexcept override { world_->abort(rank, reason); }

  int64_t take_sent() { return sent_.exchange(0); }

 private:
  const std::shared_ptr<ThreadWorld> world_;
  const Hosts hosts_;
  std::atomic<int64_t> sent_{0};
};

// The bytes that each host sends to others for one all-reduce of `bytes`.
std::vector<int64_t> traffic(const Hosts& hosts, int64_t bytes) {
  const int size = static_cast<int>(hosts.size());
  const auto world = std::make_shared<ThreadWorld>(size, hosts);
  std::vector<std::atomic<int64_t>> sent(hosts.back() + 1);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto transport = std::make_shared<CountingTransport>(world, hosts);
      const auto communicator =
          std::make_shared<TransportCommunicator>(transport, world_group(rank, size));
      communicator->barrier();  // sets up
      transport->take_sent();
      communicator->all_reduce(at::ones({bytes / 4}));
      sent[hosts[rank]] += transport->take_sent();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return {sent.begin(), sent.end()};
}

TEST(Traffic, OfTwoHostsIsThatOfARing) {
  const int64_t bytes = 8 << 20;
  EXPECT_THAT(traffic({0, 0, 1, 1}, bytes), ::testing::Each(::testing::Le(bytes)));
  EXPECT_THAT(traffic({0, 0, 0, 1}, bytes), ::testing::Each(::testing::Le(bytes)));
}

TEST(Traffic, OfThreeHostsIsTwiceTheTensorAtMost) {
  const int64_t bytes = 8 << 20;
  EXPECT_THAT(traffic({0, 0, 1, 1, 2, 2}, bytes), ::testing::ElementsAre(bytes, 2 * bytes, bytes));
}

}  // namespace
}  // namespace smp::comm
