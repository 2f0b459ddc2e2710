// SPDX-License-Identifier: Apache-2.0
#include "smp/group.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "core/stop_request.h"
#include "runtime/runtime.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

void on_four_ranks(const std::function<void()>& test) {
  run_as_threads(4, stages(2).ddp(true), test);
}

TEST(Groups, AllReduceAddsInTheOrderOfTheRanks) {
  on_four_ranks([] {
    const auto mine = torch::full({2, 3}, 1.0F + rank()).t();
    for (const CommGroup kind : {CommGroup::kWorld, CommGroup::kPp, CommGroup::kTp, CommGroup::kRdp,
                                 CommGroup::kMp, CommGroup::kDp}) {
      auto expected = torch::zeros({3, 2});
      for (int member : group(kind).ranks()) expected += 1.0F + member;
      expect_equal(all_reduce(mine, kind), expected, to_string(kind));
      EXPECT_EQ(group(kind).ranks()[group(kind).rank()], rank());
    }
    expect_equal(mine, torch::full({3, 2}, 1.0F + rank()), "the operand");
  });
}

TEST(Groups, AllGatherKeepsTheOrderOfTheRanks) {
  on_four_ranks([] {
    const auto all = group(CommGroup::kWorld).all_gather(torch::full({3}, rank(), torch::kLong));
    expect_equal(all, torch::arange(4).unsqueeze(1).expand({4, 3}), "world");
    expect_equal(group(CommGroup::kDp).all_gather(torch::scalar_tensor(dp_rank())),
                 torch::arange(2).to(torch::kFloat), "of scalars");
  });
}

TEST(Groups, CommunicateBetweenStepsOnly) {
  run_as_threads(1, Config(), [] {
    runtime::Runtime::get().current_step.is_running = true;
    const auto x = torch::ones({1}).requires_grad_();
    const auto text = error_of<UsageError>([&] { std::ignore = all_reduce(x, CommGroup::kDp); });
    const std::vector<std::pair<std::string, std::function<at::Tensor(const Group&)>>> others = {
        {"all_gather", [&](const Group& world) { return world.all_gather(x); }},
        {"reduce_scatter", [&](const Group& world) { return world.reduce_scatter(x); }},
        {"all_to_all", [&](const Group& world) { return world.all_to_all(x); }},
        {"broadcast", [&](const Group& world) { return world.broadcast(x, 0); }},
    };
    for (const auto& [name, call] : others) {
      expect_has(error_of<UsageError>([&, call = call] { call(CommGroup::kWorld); }),
                 {"smp::Group::" + name + " was called inside a step function"});
    }
    const auto started = error_of<UsageError>([] { std::ignore = group(CommGroup::kDp).async(); });
    EXPECT_EQ(group(CommGroup::kDp).rank(), 0);
    runtime::Runtime::get().current_step.is_running = false;
    expect_has(text, {"smp::all_reduce was called inside a step function; communicate between"});
    expect_has(started, {"smp::Group::async was called inside a step function"});
  });
}

/// Looked up when it is used: a model may have given the ranks another communicator since.
TEST(Groups, MayBeNamedBeforeInit) {
  const Group world = CommGroup::kWorld;
  expect_has(error_of<UsageError>([&] { world.rank(); }), {"smp is not initialised"});
  run_as_threads(2, Config().ddp(true), [&] {
    EXPECT_EQ(world.rank(), rank());
    const auto largest = world.all_reduce(torch::full({2}, rank()), ReduceOp::kMax);
    expect_equal(largest, torch::full({2}, 1), "the largest");
  });
}

/// The losses of 4 microbatches, however many replicas share them.
TEST(Groups, MeansOverAllReplicasHaveTheBitsOfOne) {
  const auto losses = torch::tensor({0.1F, 1e8F, -1e8F, 0.7F}).unbind();
  const auto whole = StepOutput(losses).reduce_mean();
  for (int replicas : {1, 2, 4}) {
    run_as_threads(replicas, stages(1).ddp(true), [&] {
      const int count = 4 / replicas;
      const auto first = losses.begin() + dp_rank() * count;
      const StepOutput mine(std::vector<at::Tensor>(first, first + count));
      expect_equal(mine.reduce_mean(CommGroup::kDp), whole, std::to_string(replicas));
    });
  }
}

TEST(Shard, GivesEachReplicaItsPart) {
  const auto batch = torch::arange(24).view({6, 4});
  on_four_ranks([&] {
    expect_equal(shard(batch), batch.narrow(0, 3 * dp_rank(), 3), "rows");
    expect_equal(shard(batch, -1), batch.narrow(1, 2 * dp_rank(), 2), "columns");
    EXPECT_TRUE(shard(batch).is_alias_of(batch));
  });
}

/// The ranks of a tensor-parallel group are given one batch then.
TEST(Shard, IsTheSameOnRanksThatShareAPrescaledBatch) {
  const auto batch = torch::arange(8);
  const auto config = Config().tensor_parallel_degree(2).ddp(true);
  run_as_threads(4, config, [&] { EXPECT_EQ(shard(batch).numel(), 2); });
  run_as_threads(4, Config(config).prescaled_batch(true),
                 [&] { expect_equal(shard(batch), batch.narrow(0, 4 * rdp_rank(), 4), "half"); });
}

TEST(Shard, RefusesUnequalParts) {
  on_four_ranks([] {
    expect_has(error_of<UsageError>([] {
                 std::ignore = shard(torch::zeros({5, 2}));
               }),
               {"smp::shard: a tensor of shape [5, 2] has no 2 equal parts along axis 0, one for "
                "each replica. Choose a batch size that is a multiple of 2, or drop the last"});
    expect_has(error_of<UsageError>([] { std::ignore = shard(torch::Tensor()); }),
               {"smp::shard: the batch is undefined"});
    expect_has(error_of<UsageError>([] { std::ignore = shard(torch::zeros({4}), 1); }),
               {"smp::shard: a tensor of shape [4] has no axis 1"});
  });
}

TEST(StopRequests, AreKnownToAllRanksForGood) {
  const Config config = stages(2).ddp(true).preempt_seconds(60);
  run_as_threads(4, config, [] {
    EXPECT_FALSE(stop_requested());
    barrier();  // all have asked
    core::set_stop_requested(true);
    EXPECT_TRUE(stop_requested());
    barrier();
    core::set_stop_requested(false);
    EXPECT_TRUE(stop_requested());
  });
  core::set_stop_requested(true);
  on_four_ranks([] { EXPECT_FALSE(stop_requested()) << "without \"preempt_seconds\""; });
  core::set_stop_requested(false);
}

TEST(StopRequests, AreAskedForBetweenSteps) {
  run_as_threads(1, Config().preempt_seconds(60), [] {
    runtime::Runtime::get().current_step.is_running = true;
    expect_has(error_of<UsageError>([] { std::ignore = stop_requested(); }),
               {"smp::stop_requested was called inside a step function; ask between steps"});
  });
}

}  // namespace
}  // namespace smp::testing
