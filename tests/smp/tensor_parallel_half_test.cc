// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "runtime/runtime.h"
#include "tests/smp/recipe.h"
#include "tests/smp/tensor_parallel_sharding.h"

// Half precision where layers are divided, against one plain process.
namespace smp {
namespace {

using namespace testing;
using namespace testing::precision;

constexpr int kDegree = 2;

/// Trains as `train_ranks` does, on ranks that divide the layers. Masters are whole, as the
/// optimizer's state dictionary has them.
Trace train_divided(
    int stages, const Recipe& recipe, int replicas = 1,
    const std::function<Config(Config)>& change = [](Config config) { return config; }) {
  const int ranks = kDegree * stages * replicas;
  Trace trace;
  Losses losses(trace);
  std::mutex mutex;
  std::vector<Net> nets;
  for (int i = 0; i < ranks; ++i) nets.push_back(make_net());
  std::set<std::string> divided;
  std::map<std::string, torch::Tensor> local_masters;  // masters of whole parameters
  const auto config = testing::stages(stages)
                          .tensor_parallel_degree(kDegree)
                          .ddp(true)
                          .microbatches(Layout::kMicrobatches / kDegree / replicas)
                          .gradient_shards(Layout::kShards);
  run_as_threads(ranks, with_precision(change(config), recipe.precision), [&] {
    set_tensor_parallelism(*nets[rank()]);
    DistributedModel<Net> model(nets[rank()]);
    const auto plain = recipe.optimizer(model->parameters());
    auto optimizer = distributed(*plain);
    if (recipe.scales()) optimizer.scale_loss(recipe.scale);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = loss_of(model(x), y);
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < kSteps; ++i) {
      const auto [x, y] = batch_of(i, recipe.spike());
      optimizer.zero_grad();
      losses.note(i, train(own(x), own(y)));
      optimizer.step();
      const std::lock_guard lock(mutex);
      if (static_cast<int>(trace.scales.size()) == i) {
        trace.scales.push_back(optimizer.loss_scale());
        trace.skipped.push_back(optimizer.overflow());
      }
      EXPECT_EQ(trace.scales.back(), optimizer.loss_scale());
      EXPECT_EQ(trace.skipped.back(), optimizer.overflow());
    }
    const auto own_state = optimizer.impl().local_state();
    const auto whole_state = optimizer.state_dict();
    const auto weights = to_map(model->state_dict());
    const std::lock_guard lock(mutex);
    for (const auto* entry : runtime::Runtime::get().table().divided()) {
      divided.insert(entry->name);
    }
    for (const auto& [name, param] : own_state.params) {
      if (divided.count(name) > 0 || param.tensors.count("master") == 0) continue;
      const auto master = param.tensors.at("master").clone();
      const auto& first = local_masters.emplace(name, master).first->second;
      EXPECT_TRUE(torch::equal(master, first)) << name << " on rank " << rank();
    }
    for (const auto& [name, param] : whole_state.params) {
      if (name == "unused" || param.tensors.count("master") == 0) continue;
      const auto& master = param.tensors.at("master");
      const auto& first = trace.masters.emplace(name, master).first->second;
      EXPECT_TRUE(torch::equal(master, first)) << name << " on rank " << rank();
    }
    trace.weights = weights;
  });
  for (const char* name : {"in.weight", "in.bias", "middle.weight"}) {
    EXPECT_EQ(divided.count(name), 1u) << name;
  }
  EXPECT_EQ(local_masters.count("norm.weight"), 1u);
  return trace;
}

double largest_difference(const torch::Tensor& got, const torch::Tensor& expected) {
  return (got.to(torch::kFloat) - expected.to(torch::kFloat)).abs().max().item<double>();
}

/// Equal but for the rounding of sums in parts. SGD's updates are in proportion to gradients, so
/// that a difference of few digits stays one.
void expect_near(const Trace& got, const Trace& expected, double bound) {
  EXPECT_EQ(got.scales, expected.scales);
  EXPECT_EQ(got.skipped, expected.skipped);
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i) {
    const double size = std::max(1.0, expected.losses[i].abs().item<double>());
    EXPECT_LE(largest_difference(got.losses[i], expected.losses[i]), bound * size) << i;
  }
  ASSERT_EQ(got.masters.size(), expected.masters.size());
  double masters = 0;
  for (const auto& [name, master] : expected.masters) {
    masters = std::max(masters, largest_difference(got.masters.at(name), master));
    ASSERT_EQ(got.masters.count(name), 1u) << name;
    EXPECT_EQ(got.masters.at(name).scalar_type(), torch::kFloat);
    EXPECT_LE(largest_difference(got.masters.at(name), master), bound) << name;
  }
  std::cout << "largest difference of a master " << masters << ", allowed " << bound << std::endl;
  for (const auto& [name, weight] : expected.weights) {
    EXPECT_EQ(got.weights.at(name).scalar_type(), weight.scalar_type()) << name;
    EXPECT_LE(largest_difference(got.weights.at(name), weight), 2 * bound) << name;
  }
}

void check(const Recipe& recipe, int skipped, double bound) {
  torch::set_num_threads(1);
  const Trace plain = train_plain(recipe);
  EXPECT_EQ(count_skipped(plain), skipped);
  for (const int stages : {1, 2}) {
    SCOPED_TRACE(::testing::Message() << stages << " stages, " << recipe.precision.type);
    const Trace got = train_divided(stages, recipe);
    expect_near(got, plain, bound);
    expect_same(train_divided(stages, recipe), got);
  }
}

// The last digit of numbers below 1 is 2^-11 in float16, 2^-8 in bfloat16; a few are allowed.
constexpr double kFp16Bound = 4.0 / 2048, kBf16Bound = 4.0 / 256;
const auto kSgd = torch::optim::SGDOptions(0.1).momentum(0.9);

/// The microbatch of one rank overflows in three steps: all ranks skip those.
TEST(TensorParallelHalf, SkipsStepsTogether) {
  check(recipe<torch::optim::SGD>(kFp16, kSgd, lively(), /*overflows=*/true), 3, kFp16Bound);
  check(recipe<torch::optim::SGD>(kBf16, kSgd, lively(), /*overflows=*/true), 3, kBf16Bound);
}

TEST(TensorParallelHalf, TrainsAsOneProcessUpToRounding) {
  check(recipe<torch::optim::SGD>(kFp16, kSgd, LossScaleOptions().static_loss_scale(1024)), 0,
        kFp16Bound);
  check(recipe<torch::optim::SGD>(kBf16, kSgd), 0, kBf16Bound);
}

/// Replicas that divide parts, of states or of parameters; with steps that overflow.
TEST(TensorParallelHalf, HasTheBitsOfWholeReplicas) {
  torch::set_num_threads(1);
  const auto overflowing = recipe<torch::optim::SGD>(kFp16, kSgd, lively(), /*overflows=*/true);
  const auto adam = recipe<torch::optim::AdamW>(kBf16, torch::optim::AdamWOptions(0.01));
  for (const Recipe& trained : {overflowing, adam}) {
    const Trace whole = train_divided(1, trained, 2);
    expect_same(train_divided(1, trained, 2, with_divided_states), whole);
    expect_same(train_divided(1, trained, 2, with_divided_parameters), whole);
  }
}

}  // namespace
}  // namespace smp
