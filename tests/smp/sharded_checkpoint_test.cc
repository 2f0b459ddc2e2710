// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "checkpoint/reader.h"
#include "tests/smp/sharded_state.h"
#include "tests/temp_folder.h"

// Checkpoints of a sharded optimizer are those of any other.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

const auto kAdam = recipe<to::Adam>(to::AdamOptions(0.01).amsgrad(true).weight_decay(0.01), true);
const auto kAdagrad = recipe<to::Adagrad>(to::AdagradOptions(0.05).initial_accumulator_value(0.1));

class ShardedCheckpoint : public ::testing::Test {
 protected:
  std::string path(int step) const { return folder_.file(std::to_string(step)); }

  const TempFolder folder_;
};

/// Twelve microbatches in six shards, on any number of ranks, at a constant rate.
template <class Recipe>
TrainingCase<ShardedNet, Recipe> laid_out(int stages, int replicas, bool sharded,
                                          const Recipe& recipe) {
  auto result =
      sharded_case({stages, replicas, sharded, 12 / replicas, /*gradient_shards=*/6}, recipe);
  result.decays = false;
  return result;
}

/// Each run goes on where the one before stopped.
template <class Recipe>
void expect_resumes(const Recipe& recipe, const std::function<std::string(int)>& path) {
  const std::vector<TrainingCase<ShardedNet, Recipe>> runs{
      laid_out(1, 2, true, recipe), laid_out(1, 3, true, recipe), laid_out(1, 1, false, recipe),
      laid_out(2, 2, true, recipe), laid_out(3, 1, true, recipe), laid_out(1, 2, false, recipe),
      laid_out(2, 3, true, recipe)};
  const auto count = static_cast<int>(runs.size());
  Named got;
  for (int i = 0; i < count; ++i) {
    auto run = runs[i];
    run.steps = count;
    got = run.run_on_ranks({i, i + 1, i > 0 ? path(i) : "", path(i + 1)}).weights;
  }
  auto whole = laid_out(1, 1, false, recipe);
  whole.steps = count;
  expect_equal(got, whole.run_on_ranks().weights, "value");
}

TEST_F(ShardedCheckpoint, MovesBetweenLayouts) {
  expect_resumes(kAdam, [&](int step) { return path(step); });
}

TEST_F(ShardedCheckpoint, MovesStateThatConstructorsMake) {
  expect_resumes(kAdagrad, [&](int step) { return path(step); });
}

/// The same tensors and numbers as one that was written without sharding.
TEST_F(ShardedCheckpoint, HoldsWhatAnyOtherHolds) {
  for (const bool sharded : {false, true}) {
    const auto run = laid_out(2, 3, sharded, kAdam);
    run.run_on_ranks({0, run.steps, "", path(sharded)});
  }
  checkpoint::Reader plain(path(0)), sharded(path(1));
  EXPECT_EQ(plain.index().optimizer, sharded.index().optimizer);
  ASSERT_EQ(plain.index().optimizer_tensors.size(), sharded.index().optimizer_tensors.size());
  EXPECT_GT(plain.index().optimizer_tensors.size(), 60u);
  for (const auto& [name, entry] : plain.index().optimizer_tensors) {
    expect_equal(sharded.read_optimizer(name), plain.read_optimizer(name), name);
  }
  ASSERT_EQ(plain.index().model.size(), sharded.index().model.size());
  for (const auto& [name, entry] : plain.index().model) {
    expect_equal(sharded.read_model(name), plain.read_model(name), name);
  }
}

}  // namespace
}  // namespace smp
