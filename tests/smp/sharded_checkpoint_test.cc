// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "checkpoint/reader.h"
#include "tests/smp/sharded_state.h"

// Checkpoints of a sharded optimizer are those of any other.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

const auto kAdam = recipe<to::Adam>(to::AdamOptions(0.01).amsgrad(true).weight_decay(0.01), true);
const auto kAdagrad = recipe<to::Adagrad>(to::AdagradOptions(0.05).initial_accumulator_value(0.1));

class ShardedCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "smp_sharded_state";
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(int step) const { return folder_ + "/" + std::to_string(step); }

  std::string folder_;
};

/// Twelve microbatches in six shards, on any number of ranks.
Training laid_out(int stages, int replicas, bool sharded) {
  Training run{stages, replicas, sharded};
  run.microbatches = 12 / replicas;
  return run.with_shards(6);
}

/// Each run goes on where the one before stopped.
template <class Recipe>
void expect_resumes(const Recipe& recipe, const std::function<std::string(int)>& path) {
  const std::vector<Training> runs{
      laid_out(1, 2, true), laid_out(1, 3, true),  laid_out(1, 1, false), laid_out(2, 2, true),
      laid_out(3, 1, true), laid_out(1, 2, false), laid_out(2, 3, true)};
  Named got;
  for (size_t i = 0; i < runs.size(); ++i) {
    Training run = runs[i];
    run.first_step = static_cast<int>(i);
    run.last_step = run.first_step + 1;
    if (i > 0) run.load = path(run.first_step);
    run.save = path(run.last_step);
    got = train_ranks(run, recipe);
  }
  Training whole = laid_out(1, 1, false);
  whole.last_step = static_cast<int>(runs.size());
  whole.save = path(100);  // without a scheduler, like the others
  expect_equal(got, train_ranks(whole, recipe), "value");
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
    Training run = laid_out(2, 3, sharded);
    run.save = path(sharded);
    train_ranks(run, kAdam);
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
