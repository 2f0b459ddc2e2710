// SPDX-License-Identifier: Apache-2.0
#include "dp/sharded_parameters.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/threads/run_ranks.h"
#include "core/check.h"
#include "dp/sharded_gradients.h"
#include "tests/error_of.h"

namespace smp::dp {
namespace {

/// Tensors of several shapes, one with the strides of a transpose, one smaller than a rank's shard.
std::vector<at::Tensor> make_shards() {
  std::vector<at::Tensor> parameters;
  for (const auto& tensor :
       {at::arange(15 * 30).view({15, 30}), at::arange(200).view({10, 20}).t(), at::arange(7)}) {
    // Memory of their own, in their layout.
    parameters.push_back(
        at::empty_strided(tensor.sizes(), tensor.strides(), at::kFloat).copy_(tensor));
    parameters.back().set_requires_grad(true);
  }
  return parameters;
}

const std::vector<std::string> kShardNames{"weight", "transposed", "bias"};

std::shared_ptr<ShardedParameters> divide(const std::vector<at::Tensor>& parameters,
                                          const comm::CommunicatorPtr& group) {
  auto sharded = std::make_shared<ShardedParameters>(group);
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_EQ(sharded->add(parameters[i], kShardNames[i]), i);
  }
  return sharded;
}

/// The values of a parameter, put together.
at::Tensor full(const ShardedParameters& sharded, size_t i) {
  const at::Tensor& parameter = sharded.parameter(i);
  comm::Communicator& group = *sharded.group();
  const comm::Sharding sharding{parameter.sizes().vec(),
                                comm::memory_order(parameter),
                                {{{1, group.size()}, sharded.range(i)}}};
  const at::Tensor& own = sharded.shard(i);
  EXPECT_EQ(own.sizes(), at::IntArrayRef(sharding.sizes_of(group.rank())));
  return comm::join(group, {{sharding, own}}, own.options(), group.rank(), std::nullopt).front();
}

TEST(ShardedParameters, AreWholeBetweenGatherAndRelease) {
  const auto expected = make_shards();
  comm::run_ranks(3, [&](const comm::CommunicatorPtr& group) {
    const auto parameters = make_shards();
    const at::Tensor view = parameters[0].detach().t();
    const auto version = parameters[0]._version();
    const auto sharded = divide(parameters, group);
    int64_t held = 0;
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(parameters[i].storage().nbytes(), 0u);
      held += sharded->shard(i).numel();
    }
    // 450 = 192 + 192 + 66, 200 = 128 + 72 + 0, 7 + 0 + 0.
    const int64_t elements[] = {192 + 128 + 7, 192 + 72, 66};
    EXPECT_EQ(held, elements[group->rank()]);
    smp::testing::expect_has(
        smp::testing::error_of<std::exception>([&] { parameters[0].sum(); }),
        "the data of a parameter that sharded data parallelism has divided over ranks");
    for (int repetition = 0; repetition < 2; ++repetition) {
      for (size_t i = 0; i < 3; ++i) sharded->gather(i);
      for (size_t i = 0; i < 3; ++i) {
        sharded->wait(i);
        EXPECT_TRUE(at::equal(parameters[i], expected[i])) << kShardNames[i];
      }
      EXPECT_TRUE(at::equal(view, expected[0].t()));
      for (size_t i = 0; i < 3; ++i) sharded->release(i);
      EXPECT_EQ(parameters[0].storage().nbytes(), 0u);
    }
    EXPECT_EQ(parameters[0]._version(), version);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::equal(full(*sharded, i), expected[i]));
      EXPECT_EQ(full(*sharded, i).strides(), expected[i].strides());
    }
  });
}

TEST(ShardedParameters, ShardsAreWhatIsGathered) {
  comm::run_ranks(2, [&](const comm::CommunicatorPtr& group) {
    const auto parameters = make_shards();
    const auto sharded = divide(parameters, group);
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < 3; ++i) sharded->shard(i).mul_(2);
    const auto expected = make_shards();
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(full(*sharded, i), expected[i] * 2));
  });
}

TEST(ShardedParameters, OthersCannotBeDivided) {
  const at::Tensor memory = at::zeros({40});
  EXPECT_TRUE(ShardedParameters::is_divisible(memory));
  EXPECT_FALSE(ShardedParameters::is_divisible(memory.narrow(0, 0, 20)));
  EXPECT_FALSE(ShardedParameters::is_divisible(memory.slice(0, 0, 40, 2)));
  EXPECT_FALSE(ShardedParameters::is_divisible(at::zeros({1}).expand({5})));
  EXPECT_FALSE(ShardedParameters::is_divisible(at::zeros({0})));
}

/// Data are there from the first gather to the last release.
TEST(ShardedParameters, SeveralMayUseOne) {
  comm::run_ranks(2, [](const comm::CommunicatorPtr& group) {
    ShardedParameters sharded(group);
    for (int i = 0; i < 3; ++i) sharded.add(at::full({100}, i), std::to_string(i));
    sharded.gather(1);
    sharded.gather(2);
    sharded.gather(1);
    EXPECT_EQ(sharded.live(), 200);
    sharded.wait(1);
    sharded.release(1);
    EXPECT_EQ(sharded.parameter(1).min().item<int>(), 1);
    sharded.release(1);
    EXPECT_FALSE(sharded.is_live(1));
    EXPECT_EQ(sharded.parameter(1).storage().nbytes(), 0U);
    EXPECT_EQ(sharded.live(), 100);
    sharded.release(2);  // while it is under way
    EXPECT_EQ(sharded.live(), 0);
    EXPECT_EQ(sharded.peak_live(), 200);
    sharded.lend();
    EXPECT_EQ(sharded.parameter(2).max().item<int>(), 2);
    sharded.gather(0);  // its step fails
    sharded.take_back();
    EXPECT_EQ(sharded.live(), 0);
  });
}

struct ShardedCase {
  int replicas;
  int degree;
  int shards;
  int64_t bucket_elements;
};

class ShardedGradientsTest : public ::testing::TestWithParam<ShardedCase> {};

at::Tensor shard_gradient(size_t parameter, int global_microbatch) {
  at::manual_seed(100 * parameter + global_microbatch);
  const auto like = make_shards()[parameter];
  return at::empty_strided(like.sizes(), like.strides(), at::kFloat).normal_();
}

constexpr int kMicrobatches = 12;  // microbatches of all replicas

/// Gradients summed as documented.
at::Tensor expected_mean(size_t parameter, int shards) {
  at::Tensor total;
  for (int shard = 0; shard < shards; ++shard) {
    at::Tensor sum;
    const int first = shard * kMicrobatches / shards;
    for (int m = first; m < first + kMicrobatches / shards; ++m) {
      const auto g = shard_gradient(parameter, m);
      sum = sum.defined() ? sum + g : g;
    }
    total = total.defined() ? total + sum : sum;
  }
  return total / kMicrobatches;
}

TEST_P(ShardedGradientsTest, HasTheBitsOfOneProcess) {
  const auto [replicas, degree, shards, bucket_elements] = GetParam();
  // The default generator is shared by the rank threads, so draw before they start.
  std::vector<std::vector<at::Tensor>> gradients(2);
  std::vector<at::Tensor> means;
  for (size_t p = 0; p < 2; ++p) {
    for (int m = 0; m < kMicrobatches; ++m) gradients[p].push_back(shard_gradient(p, m));
    means.push_back(expected_mean(p, shards));
  }
  const int count = replicas, size = degree;
  ShardedGradientOptions options;
  options.bucket_elements = bucket_elements;
  options.microbatches = kMicrobatches / replicas;
  options.gradient_shards = shards;
  options.divisor = kMicrobatches;
  comm::run_ranks(count, [&](const comm::CommunicatorPtr& world) {
    std::vector<int> group, same_shard;
    for (int r = 0; r < count; ++r) {
      if (r / size == world->rank() / size) group.push_back(r);
      if (r % size == world->rank() % size) same_shard.push_back(r);
    }
    const auto sharded = divide(make_shards(), world->split(group, "shards"));
    ShardedGradients reduced(sharded, {2, 1, 0}, world,
                             world->split(same_shard, "replication group"), options);
    EXPECT_EQ(reduced.buckets().size(), options.bucket_elements < 400 ? 2u : 1u);
    for (int step = 1; step <= 2; ++step) {
      for (int m = 0; m < options.microbatches; ++m) {
        for (size_t p = 0; p < 2; ++p) {
          reduced.add(p, m, gradients[p][world->rank() * options.microbatches + m]);
        }
      }
      reduced.reduce();
      reduced.finish();
      for (size_t p = 0; p < 2; ++p) {
        // The second step adds to `.grad`, as backward does.
        EXPECT_TRUE(sharded->has_gradient(p));
        const auto& piece = sharded->own()[p];
        if (!piece.defined()) continue;
        const auto [begin, end] = sharded->owned(p, sharded->group()->rank());
        const auto all = sharded->flat(step == 1 ? means[p] : means[p] + means[p], p);
        const auto want = all.slice(0, begin, end);
        EXPECT_TRUE(at::equal(sharded->shard(p).grad(), want))
            << kShardNames[p] << " step " << step;
      }
      EXPECT_FALSE(sharded->has_gradient(2));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, ShardedGradientsTest,
                         ::testing::Values(ShardedCase{2, 2, 2, 1000}, ShardedCase{3, 3, 3, 1000},
                                           ShardedCase{4, 2, 4, 1000}, ShardedCase{4, 4, 4, 1000},
                                           ShardedCase{4, 2, 4, 300}, ShardedCase{4, 2, 12, 300},
                                           ShardedCase{2, 2, 4, 1000}));

TEST(ShardedGradients, AddUpOverSteps) {
  comm::run_ranks(2, [](const comm::CommunicatorPtr& world) {
    const auto sharded = divide(make_shards(), world);
    ShardedGradientOptions options;
    options.gradient_shards = 2;
    options.backward_passes = 2;
    ShardedGradients reduced(sharded, {2, 1, 0}, world,
                             world->split({world->rank()}, "replication group"), options);
    for (int step = 0; step < 4; ++step) {
      EXPECT_EQ(reduced.is_adding_up(), step % 2 == 1);
      reduced.add(0, 0, at::full({15, 30}, step + 10. * world->rank()));
      reduced.reduce();
      reduced.finish();
    }
    EXPECT_TRUE(at::equal(sharded->shard(0).grad(), at::full_like(sharded->shard(0), 52)));
  });
}

TEST(ShardedGradients, RefuseSparseGradients) {
  comm::run_ranks(1, [](const comm::CommunicatorPtr& world) {
    const auto sharded = divide(make_shards(), world);
    ShardedGradients reduced(sharded, {0, 1, 2}, world, world, {});
    smp::testing::expect_has(smp::testing::error_of<std::exception>([&] {
                               reduced.add(0, 0, at::zeros({15, 30}).to_sparse());
                             }),
                             "parameter \"weight\" has a sparse gradient");
  });
}

TEST(ShardedParameters, ARankThatFailsDuringAGatherIsNamed) {
  std::string text;
  smp::testing::error_of<std::exception>([&] {
    comm::run_ranks(2, [&](const comm::CommunicatorPtr& group) {
      const auto sharded = divide(make_shards(), group);
      if (group->rank() == 1) throw Error("out of luck");
      text = smp::testing::error_of<std::exception>([&] {
        sharded->gather(1);
        sharded->wait(1);
      });
    });
  });
  smp::testing::expect_has(text, "rank 1");
  smp::testing::expect_has(text, "out of luck");
  smp::testing::expect_has(text, "all_gather");
  smp::testing::expect_has(text,
                           "[while sharded data parallelism gathered parameter \"transposed\"]");
}

TEST(ShardedGradients, ARankThatFailsDuringAReductionIsNamed) {
  std::string text;
  smp::testing::error_of<std::exception>([&] {
    comm::run_ranks(2, [&](const comm::CommunicatorPtr& group) {
      const auto sharded = divide(make_shards(), group);
      ShardedGradientOptions options;
      options.gradient_shards = 2;
      ShardedGradients reduced(sharded, {2, 1, 0}, group,
                               group->split({group->rank()}, "replication group"), options);
      if (group->rank() == 1) throw Error("out of luck");
      text = smp::testing::error_of<std::exception>([&] {
        reduced.add(1, 0, at::zeros({20, 10}));
        reduced.reduce();
        reduced.finish();
      });
    });
  });
  smp::testing::expect_has(text, "out of luck");
  smp::testing::expect_has(text, "reduce_scatter");
  smp::testing::expect_has(
      text, "[while sharded data parallelism reduced gradient bucket 1 of 1: bias ... weight]");
}

}  // namespace
}  // namespace smp::dp
