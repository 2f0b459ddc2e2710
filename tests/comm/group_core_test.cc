// SPDX-License-Identifier: Apache-2.0
#include "comm/group_core.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "comm/threads/run_ranks.h"
#include "smp/error.h"
#include "tests/error_of.h"

namespace smp {
namespace {

using smp::testing::error_of;
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

TEST(PublicGroup, ReturnsRowsAndTheRootsTensor) {
  on_ranks([](const Group& group) {
    const at::Tensor mine = of_rank(group.rank());
    expect_equal(group.reduce_scatter(mine), 6 * of_rank(0)[group.rank()]);
    expect_equal(group.reduce_scatter(mine, ReduceOp::kMin), of_rank(0)[group.rank()]);
    expect_equal(group.all_to_all(mine),
                 at::stack({of_rank(0), of_rank(1), of_rank(2)}).select(1, group.rank()));
    expect_equal(group.broadcast(mine.t(), 2), of_rank(2).t());
    expect_equal(mine, of_rank(group.rank()));
  });
}

TEST(PublicGroup, AddsComplexNumbers) {
  on_ranks([](const Group& group) {
    const auto of = [](int rank) { return at::complex(of_rank(rank), -of_rank(rank)); };
    const at::Tensor mine = of(group.rank());
    expect_equal(group.all_reduce(mine), 6 * of(0));
    expect_equal(group.all_reduce(mine.conj(), ReduceOp::kAverage), (2 * of(0)).conj());
    expect_equal(group.all_gather(mine.conj())[1], of(1).conj());
    EXPECT_THAT(
        error_of<UsageError>([&] { std::ignore = group.all_reduce(mine, ReduceOp::kProduct); }),
        HasSubstr("product is not defined for ComplexFloat. Complex numbers can be summed and "
                  "averaged; all_gather them for anything else."));
  });
}

/// A collective, and its result on rank `rank` by operators on the tensors of all ranks.
struct LinearMap {
  const char* name;
  std::function<at::Tensor(const Group& group, const at::Tensor& tensor)> collective;
  std::function<at::Tensor(const std::vector<at::Tensor>& all, int rank)> plain;
};

std::vector<LinearMap> linear_maps() {
  const auto sum = [](const auto& all, int) { return all[0] + all[1] + all[2]; };
  const auto row = [sum](const auto& all, int rank) { return sum(all, rank)[rank]; };
  return {
      {"all_reduce", [](auto& group, auto& x) { return group.all_reduce(x); }, sum},
      {"average", [](auto& group, auto& x) { return group.all_reduce(x, ReduceOp::kAverage); },
       [sum](auto& all, int rank) { return sum(all, rank) / 3; }},
      {"all_gather", [](auto& group, auto& x) { return group.all_gather(x); },
       [](auto& all, int) { return at::stack(all); }},
      {"reduce_scatter", [](auto& group, auto& x) { return group.reduce_scatter(x); }, row},
      {"scattered average",
       [](auto& group, auto& x) { return group.reduce_scatter(x, ReduceOp::kAverage); },
       [row](auto& all, int rank) { return row(all, rank) / 3; }},
      {"all_to_all", [](auto& group, auto& x) { return group.all_to_all(x); },
       [](auto& all, int rank) { return at::stack(all).select(1, rank); }},
      {"broadcast", [](auto& group, auto& x) { return group.broadcast(x, 1); },
       [](auto& all, int) { return all[1] + 0 * (all[0] + all[2]); }},
  };
}

/// Shape [2, 3], from which `given` makes the argument of the collective.
at::Tensor leaf_of(int rank, at::ScalarType type) {
  const at::Tensor values = (at::arange(6, at::kDouble).view({2, 3}) + 1) * (rank + 2) / 5;
  const bool complex = at::isComplexType(type);
  return (complex ? at::complex(values, values.sin()) : values).to(type).requires_grad_();
}
at::Tensor given(const at::Tensor& leaf) { return leaf.square().conj().t(); }

/// The loss that rank `rank` differentiates.
at::Tensor loss_of(const at::Tensor& result, int rank) {
  const at::Tensor real = result.is_complex() ? at::view_as_real(result.resolve_conj()) : result;
  const at::Tensor weights = at::arange(real.numel(), at::kDouble).view(real.sizes()) - rank;
  return (real.square() * weights).sum();
}

/// A number whose derivatives are second ones of the losses.
at::Tensor number_of(const at::Tensor& gradient, int rank) {
  return (at::abs(gradient).square() * (rank + 1)).sum();
}

at::Tensor gradient_of(const at::Tensor& number, const at::Tensor& leaf, bool create_graph) {
  return torch::autograd::grad({number}, {leaf}, {}, /*retain_graph=*/std::nullopt,
                               create_graph)[0];
}

void expect_close(const at::Tensor& got, const at::Tensor& expected, const char* what) {
  EXPECT_TRUE(at::allclose(got, expected, 1e-12, 1e-12)) << what << got << expected;
}

/// Plain libtorch differentiates the sum of all ranks' losses, and of functions of their gradients.
TEST(PublicGroup, DifferentiatesLinearCollectives) {
  for (const at::ScalarType type : {at::kDouble, at::kComplexDouble}) {
    for (const LinearMap& map : linear_maps()) {
      SCOPED_TRACE(c10::str(map.name, " of ", type));
      std::vector<at::Tensor> leaves, all;
      for (int rank = 0; rank < kRanks; ++rank) {
        leaves.push_back(leaf_of(rank, type));
        all.push_back(given(leaves.back()));
      }
      at::Tensor loss = at::zeros({}, at::kDouble), number = loss;
      for (int rank = 0; rank < kRanks; ++rank) loss = loss + loss_of(map.plain(all, rank), rank);
      const auto gradients = torch::autograd::grad({loss}, leaves, {}, {}, /*create_graph=*/true);
      for (int rank = 0; rank < kRanks; ++rank) number = number + number_of(gradients[rank], rank);
      const auto second = torch::autograd::grad({number}, leaves);

      on_ranks([&](const Group& group) {
        const int rank = group.rank();
        const at::Tensor leaf = leaf_of(rank, type);
        const at::Tensor result = map.collective(group, given(leaf));
        const at::Tensor gradient = gradient_of(loss_of(result, rank), leaf, true);
        expect_close(gradient, gradients[rank], "gradient");
        expect_close(gradient_of(number_of(gradient, rank), leaf, false), second[rank], "second");
      });
    }
  }
}

/// (1e8 + 1) - 1e8 is 0 in float32, and 1 in another order.
TEST(PublicGroup, AddsGradientsInTheOrderOfTheRanks) {
  on_ranks([](const Group& group) {
    const at::Tensor leaf = at::ones({2}).requires_grad_();
    const float weight = std::array<float, kRanks>{1e8F, 1.0F, -1e8F}[group.rank()];
    for (const at::Tensor& result : {group.all_gather(leaf), group.all_reduce(leaf)}) {
      expect_equal(gradient_of((weight * result).sum(), leaf, false), at::zeros({2}));
    }
  });
}

TEST(PublicGroup, RecordsNothingWithoutNeed) {
  on_ranks([](const Group& group) {
    for (const LinearMap& map : linear_maps()) {
      EXPECT_FALSE(map.collective(group, of_rank(0)).requires_grad()) << map.name;
      const at::Tensor leaf = at::ones({3, 2}).requires_grad_();
      EXPECT_TRUE(map.collective(group, leaf).requires_grad()) << map.name;
      const at::NoGradGuard no_grad;
      EXPECT_FALSE(map.collective(group, leaf).requires_grad()) << map.name;
    }
  });
}

TEST(PublicGroup, RefusesToLoseGradients) {
  on_ranks([](const Group& group) {
    const at::Tensor leaf = at::ones({3, 2}).requires_grad_();
    EXPECT_THAT(error_of<UsageError>([&] { std::ignore = group.all_reduce(leaf, ReduceOp::kMax); }),
                HasSubstr("smp::all_reduce (max): the tensor of shape [3, 2] requires a gradient, "
                          "and only sums and averages over ranks have one, so that it would be "
                          "lost. Pass detach() of the tensor, or make the call under "
                          "torch::NoGradGuard, where no gradient is wanted"));
    EXPECT_THAT(
        error_of<UsageError>([&] { std::ignore = group.reduce_scatter(leaf, ReduceOp::kProduct); }),
        HasSubstr("smp::Group::reduce_scatter (product): the tensor of shape [3, 2]"));
    EXPECT_THAT(error_of<UsageError>([&] { group.async().broadcast(leaf, 0)->wait(); }),
                HasSubstr("smp::Group::async().broadcast: the tensor of shape [3, 2] requires a "
                          "gradient, and collectives that are started are not differentiated "
                          "(those of smp::Group that return their result are), so that"));
    EXPECT_THAT(error_of<UsageError>([&] {
                  group.async().all_gather(at::empty({3, 3, 2}), leaf)->wait();
                }),
                HasSubstr("smp::Group::async().all_gather: the tensor of shape [3, 2]"));
    expect_equal(group.all_reduce(leaf.detach(), ReduceOp::kMax), at::ones({3, 2}));
    const at::NoGradGuard no_grad;
    expect_equal(group.all_reduce(leaf, ReduceOp::kProduct), at::ones({3, 2}));
    group.async().all_reduce(leaf)->wait();
    expect_equal(leaf, at::full({3, 2}, 3.0F));
  });
}

TEST(PublicGroup, RefusesTensorsWithoutARowForEachRank) {
  on_ranks([](const Group& group) {
    EXPECT_THAT(error_of<UsageError>([&] {
                  std::ignore = group.reduce_scatter(at::ones({2, 3}));
                }),
                HasSubstr("smp::Group::reduce_scatter: expected a tensor with 3 rows, one for each "
                          "rank of the group, got shape [2, 3]. Give it the shape [3, ...]"));
    EXPECT_THAT(error_of<UsageError>([&] { std::ignore = group.all_to_all(at::ones({})); }),
                HasSubstr("smp::Group::all_to_all: expected a tensor with 3 rows"));
    EXPECT_THAT(error_of<UsageError>([&] { std::ignore = group.all_gather(at::Tensor()); }),
                HasSubstr("smp::Group::all_gather: the tensor is undefined"));
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
    EXPECT_THAT(error_of<UsageError>([&] {
                  group.async().reduce_scatter(at::empty({4}), of_rank(group.rank()))->wait();
                }),
                HasSubstr("reduce_scatter"));
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
