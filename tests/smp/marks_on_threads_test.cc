// SPDX-License-Identifier: Apache-2.0
// Marks hold for their model, whichever thread sets them and whichever runs its steps.

#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "runtime/parameters/scope_notes.h"
#include "runtime/step/checkpointed_modules.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kRanks = 2;

/// Makes the models of all ranks on a thread of its own.
std::vector<Mlp> make_elsewhere(const std::function<Mlp(int)>& make) {
  std::vector<Mlp> nets(kRanks, Mlp{nullptr});
  std::thread([&] {
    for (int rank = 0; rank < kRanks; ++rank) nets[rank] = make(rank);
  }).join();
  return nets;
}

/// One training step on each rank, then `check(model, net)`.
void train(std::vector<Mlp>& nets, const Config& config,
           const std::function<void(DistributedModel<Mlp>&, Mlp&)>& check) {
  torch::set_num_threads(1);
  run_as_threads(kRanks, config, [&] {
    Mlp& net = nets[rank()];
    DistributedModel<Mlp> model(net);
    make_training(model)(torch::ones({4, MlpImpl::kWidth}), torch::ones({4, 1}));
    check(model, net);
  });
}

TEST(MarksOnOtherThreads, Pins) {
  auto nets = make_elsewhere([](int) {
    const auto scope = partition(0);
    Mlp net(2);
    set_partition(net->head, 1);
    return net;
  });
  train(nets, stages(kRanks), [](auto&, Mlp& net) {
    for (const auto& item : net->named_parameters()) {
      const int expected = item.key().find("head") == 0 ? 1 : 0;
      EXPECT_EQ(runtime::pinned_partition(item.value()), expected) << item.key();
      EXPECT_EQ(get_partition(item.value()).partition, expected) << item.key();
    }
  });
}

TEST(MarksOnOtherThreads, TensorParallelism) {
  auto nets = make_elsewhere([](int) {
    const auto scope = tensor_parallelism(false);
    return Mlp(2);
  });
  const auto config = Config().tensor_parallel_degree(2).ddp(true).tensor_parallelism("auto");
  train(nets, config, [](auto&, Mlp& net) {
    EXPECT_EQ(runtime::tensor_parallelism_marks().find(net->parameters()[0])->enabled, false);
  });
}

TEST(MarksOnOtherThreads, ActivationCheckpointing) {
  auto nets = make_elsewhere([](int) {
    Mlp net(2);
    set_activation_checkpointing(net);
    return net;
  });
  train(nets, stages(kRanks), [](auto&, Mlp&) {
    EXPECT_EQ(runtime::checkpointed_modules(runtime::Runtime::get()).size(), 1U);
  });
}

TEST(CheckpointOptionsType, EnumeratorsStandForStrings) {
  EXPECT_EQ(CheckpointOptions().strategy(CheckpointStrategy::kEach).strategy(), "each");
  EXPECT_EQ(CheckpointOptions().strategy(CheckpointStrategy::kContiguous).strategy(), "contiguous");
  EXPECT_EQ(CheckpointOptions().group(3).strategy(), "group_3");
}

/// Which rank's models a module is missing from is known only of those that said so.
TEST(MarksOnOtherThreads, ActivationCheckpointingOfAnotherRank) {
  std::vector<Mlp> nets{Mlp(2), Mlp(2)};
  run_as_threads(kRanks, stages(1).ddp(true).microbatches(2), [&] {
    set_activation_checkpointing(nets[rank()]);
    DistributedModel<Mlp> model(nets[rank()]);
    EXPECT_NO_THROW(make_training(model)(torch::ones({4, MlpImpl::kWidth}), torch::ones({4, 1})));
  });
}

}  // namespace
}  // namespace smp::testing
