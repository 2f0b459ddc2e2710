// SPDX-License-Identifier: Apache-2.0
#include "comm/group_core.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/threads/run_ranks.h"
#include "smp/error.h"

namespace smp {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 3;

at::Tensor of_rank(int rank) { return at::arange(6, at::kFloat).view({3, 2}) * (rank + 1); }

void expect_equal(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_TRUE(at::equal(got, expected)) << got << "\nexpected\n" << expected;
}

/// Runs `test(group)` on three ranks, which are 1, 4 and 5 of some world.
template <class Test>
void on_ranks(const Test& test) {
  comm::run_ranks(kRanks, [&](const comm::CommunicatorPtr& communicator) {
    test(comm::make_public_group(communicator, {1, 4, 5}));
  });
}

TEST(PublicGroup, KnowsItsRanks) {
  comm::run_ranks(kRanks, [](const comm::CommunicatorPtr& communicator) {
    const Group group = comm::make_public_group(communicator, {1, 4, 5});
    EXPECT_EQ(group.rank(), communicator->rank());
    EXPECT_EQ(group.size(), kRanks);
    EXPECT_EQ(group.ranks(), (std::vector<int>{1, 4, 5}));
  });
}

TEST(PublicGroup, ReturnsResults) {
  on_ranks([](const Group& group) {
    const at::Tensor mine = of_rank(group.rank());
    expect_equal(group.all_reduce(mine), 6 * of_rank(0));
    expect_equal(group.all_reduce(mine.t(), ReduceOp::kMax), of_rank(2).t());
    expect_equal(group.all_gather(mine), at::stack({of_rank(0), of_rank(1), of_rank(2)}));
    expect_equal(mine, of_rank(group.rank()));
    group.barrier();
  });
}

TEST(PublicGroup, ReducesInPlace) {
  on_ranks([](const Group& group) {
    at::Tensor tensor = of_rank(group.rank());
    group.async().all_reduce(tensor, ReduceOp::kAverage)->wait();
    expect_equal(tensor, 2 * of_rank(0));

    tensor = of_rank(group.rank());
    group.async().reduce(tensor, 1)->wait();
    expect_equal(tensor, group.rank() == 1 ? 6 * of_rank(0) : of_rank(group.rank()));

    tensor = at::empty({2});
    group.async().reduce_scatter(tensor, of_rank(group.rank()))->wait();
    expect_equal(tensor, 6 * of_rank(0)[group.rank()]);
  });
}

TEST(PublicGroup, MovesTensors) {
  on_ranks([](const Group& group) {
    const AsyncCollectives start = group.async();
    const at::Tensor all = at::stack({of_rank(0), of_rank(1), of_rank(2)});
    at::Tensor tensor = of_rank(group.rank());
    start.broadcast(tensor, 2)->wait();
    expect_equal(tensor, of_rank(2));

    tensor = at::empty_like(all);
    start.all_gather(tensor, of_rank(group.rank()))->wait();
    expect_equal(tensor, all);

    tensor = group.rank() == 1 ? at::empty_like(all) : at::Tensor();
    start.gather(tensor, of_rank(group.rank()), 1)->wait();
    if (group.rank() == 1) expect_equal(tensor, all);

    tensor = at::empty({3, 2});
    start.scatter(tensor, group.rank() == 1 ? all : at::Tensor(), 1)->wait();
    expect_equal(tensor, of_rank(group.rank()));

    tensor = at::empty({3, 2});
    start.all_to_all(tensor, {}, of_rank(group.rank()), {})->wait();
    expect_equal(tensor, all.select(1, group.rank()));
    start.barrier()->wait();
  });
}

TEST(PublicGroup, HasAProcessGroup) {
  on_ranks([](const Group& group) {
    std::vector<at::Tensor> tensors{of_rank(group.rank())};
    group.process_group()->allreduce(tensors)->wait();
    expect_equal(tensors[0], 6 * of_rank(0));
    EXPECT_EQ(group.process_group(), Group(group).process_group());
  });
}

TEST(PublicGroup, RefusesTensorsThatDiffer) {
  on_ranks([](const Group& group) {
    try {
      group.async().reduce_scatter(at::empty({4}), of_rank(group.rank()))->wait();
      ADD_FAILURE() << "it was accepted";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("reduce_scatter"));
    }
  });
}

TEST(Work, CallsWhatFollowsOnceAndInWait) {
  on_ranks([](const Group& group) {
    int calls = 0;
    const at::Tensor tensor = at::ones({4});
    const WorkPtr work = then(group.async().all_reduce(tensor), [&] { ++calls; });
    while (!work->test()) {
    }
    EXPECT_EQ(calls, 0);
    work->wait();
    work->wait();
    EXPECT_EQ(calls, 1);
    expect_equal(tensor, at::full({4}, 3.0f));
  });
}

}  // namespace
}  // namespace smp
