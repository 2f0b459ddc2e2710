// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <vector>

#include "runtime/runtime.h"
#include "tests/smp/tensor_parallel_run.h"

// Training on ranks that divide layers among them, against one plain libtorch process.
namespace smp {
namespace {

using namespace testing;

class TensorParallelStep : public ::testing::TestWithParam<TensorLayout> {};

TEST_P(TensorParallelStep, IsThatOfOneProcess) {
  const auto plain = run_plain<PlainModel>();
  const auto got = run_on_ranks<DividedModel>(GetParam());
  expect_close(got, plain);
  expect_same(run_on_ranks<DividedModel>(GetParam()), got);
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorParallelStep,
                         ::testing::Values(TensorLayout{1}, TensorLayout{2}, TensorLayout{4},
                                           TensorLayout{2, 2}, TensorLayout{4, 2},
                                           TensorLayout{1, 2, 2}, TensorLayout{2, 1, 2},
                                           TensorLayout{4, 1, 2}, TensorLayout{2, 2, 2},
                                           TensorLayout{2, 1, 1, true}, TensorLayout{4, 1, 2, true},
                                           TensorLayout{2, 2, 2, true}, TensorLayout{4, 2, 1, true},
                                           TensorLayout{2, 2, 2, false, "spread"},
                                           TensorLayout{2, 2, 2, false, "PTD"}));

TEST(TensorParallelStep, RunsAgainInTheBackwardPass) {
  const TensorLayout layout{2, 2};
  const auto recompute = [](DividedModel& net) { set_activation_checkpointing(*net.blocks[1]); };
  expect_same(run_on_ranks<DividedModel>(layout, recompute), run_on_ranks<DividedModel>(layout));
}

TEST(TensorParallelModel, SaysWhatIsDivided) {
  const TensorLayout layout{2, 1, 1, true};
  run_as_threads(2, config_of(layout), [&] {
    const auto net = make_model<DividedModel>(5, /*layers=*/1);
    ModelOf<DividedModel> model(net, ModelOptions().name("lm"));
    EXPECT_TRUE(model->is_distributed_parameter(net->blocks[0]->up));
    EXPECT_FALSE(model->is_distributed_parameter(net->blocks[0]->down_bias));
    EXPECT_EQ(model->distributed_modules().keys(), std::vector<std::string>{"block0"});
    EXPECT_EQ(model->distributed_modules()["block0"].get(), net->blocks[0].get());
    EXPECT_EQ(model->scaled_batch_reducer_named_parameters().keys(),
              (std::vector<std::string>{"block0.up", "block0.up_bias", "block0.down"}));
    EXPECT_EQ(model->default_reducer_named_parameters().keys(),
              (std::vector<std::string>{"tokens.weight", "block0.down_bias", "block0.norm.weight",
                                        "block0.norm.bias", "head.weight", "head.bias"}));
  });
}

/// A module made late has the values of plain construction.
TEST(TensorParallelModel, IsMadeAfterTheFirstPlan) {
  const TensorLayout layout{2, 2};
  const auto expected = state_of(*make_model<PlainModel>(5));
  run_as_threads(4, config_of(layout), [&] {
    std::shared_ptr<DividedModel> net;
    {
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      torch::manual_seed(5);
      const auto scope = model_creation(ModelCreationOptions().delayed(true).eager_bytes(0));
      net = std::make_shared<DividedModel>();
      net->to(torch::kDouble);
    }
    ModelOf<DividedModel> model(net);
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    const auto batch = token_batch(0);
    evaluate(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    expect_equal(to_map(model->state_dict()), expected, "value");
  });
}

TEST(TensorParallelModel, TakesWholeValues) {
  const TensorLayout layout{2, 2};
  const auto other = make_model<PlainModel>(77);
  run_as_threads(4, config_of(layout), [&] {
    const auto net = make_model<DividedModel>(5);
    ModelOf<DividedModel> model(net);
    ModelCore::TensorDict state;
    for (const auto& item : other->named_parameters()) state.insert(item.key(), item.value());
    model->load_state_dict(state);
    expect_equal(to_map(model->state_dict()), state_of(*other), "value before partitioning");
    auto evaluate = step([&](torch::Tensor x, torch::Tensor y) { return net->loss(x, y); });
    const auto batch = token_batch(0);
    evaluate(own_batch(layout, batch[0]), own_batch(layout, batch[1]));
    expect_equal(to_map(model->state_dict()), state_of(*other), "value");
    const auto gathered = to_map(model->state_dict(/*gather_to_rank0=*/true));
    if (mp_rank() == 0) {
      expect_equal(gathered, state_of(*other), "gathered value");
    } else {
      EXPECT_TRUE(gathered.empty());
    }
    for (const auto& item : model->local_state_dict()) {
      const auto& entry = runtime::Runtime::get().table().at(net->named_parameters()[item.key()]);
      const auto whole = state_of(*other).at(item.key());
      expect_equal(item.value(), entry.part().cut(whole, rank()), "local value of " + item.key());
    }
    const auto text = error_of<CheckpointError>(
        [&] { model->load_state_dict(model->local_state_dict(), false); });
    expect_has(text, {"expected Double[32, 8], got Double[16, 8]", "Nothing was loaded"});
    auto local = model->local_state_dict();
    for (auto& item : local) item.value().add_(1);
    model->load_state_dict(local, /*strict=*/true, /*same_partition_load=*/true);
    for (const auto& [name, value] : to_map(model->state_dict())) {
      expect_equal(value, state_of(*other).at(name) + 1, "value of " + name);
    }
  });
}

}  // namespace
}  // namespace smp
