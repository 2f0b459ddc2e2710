// SPDX-License-Identifier: Apache-2.0
// Runs on 4 ranks under mpirun: 2 stages x 2 replicas, compared with one plain libtorch process.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "graph/absent.h"
#include "tests/smp/models.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kReplicas = 2, kMicrobatches = 2, kSteps = 4;

class MpiStep : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!is_initialized()) init(stages(2).ddp(true));
  }
};

TEST_F(MpiStep, RanksAndGroups) {
  ASSERT_EQ(size(), 4);
  EXPECT_EQ(local_rank(), rank());
  EXPECT_EQ(local_size(), 4);
  EXPECT_EQ(pp_rank(), rank() % 2);
  EXPECT_EQ(dp_rank(), rank() / 2);
  EXPECT_EQ(group(CommGroup::kPp).ranks(), (std::vector<int>{2 * dp_rank(), 2 * dp_rank() + 1}));
  EXPECT_EQ(group(CommGroup::kDp).ranks(), (std::vector<int>{pp_rank(), pp_rank() + 2}));
  expect_has(error_of<UsageError>([] { init(); }), {"twice"});
  barrier();
  barrier(CommGroup::kDp);
}

TEST_F(MpiStep, GptWithDropoutEqualsThePlainRunBitForBit) {
  // The same on every rank: each compares with a plain run of its own.
  torch::manual_seed(5);
  TinyGpt plain(true), net(true);
  copy_values(*plain, *net);
  std::vector<Tensors> batches;
  for (int i = 0; i < kSteps; ++i) batches.push_back(TinyGptImpl::batch(8));
  if (rank() != 0) {
    // Rank 0's values count.
    torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(0.25);
  }

  const auto options = torch::optim::AdamOptions(1e-2);
  const Tensors parameters = unique_parameters(*plain);
  torch::optim::Adam plain_optimizer(parameters, options);
  DistributedModel<TinyGpt> model(net);
  DistributedOptimizer<torch::optim::Adam> optimizer(model->parameters(), options);
  const auto cross_entropy = [](torch::Tensor logits, torch::Tensor targets) {
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  };
  auto train = step([&](torch::Tensor ids, torch::Tensor targets) {
    auto loss = cross_entropy(model(ids), targets);
    model->backward(loss);
    return loss;
  });
  auto evaluate = step([&](torch::Tensor ids) { return model(ids); });
  constexpr int kCount = kReplicas * kMicrobatches;
  for (int i = 0; i < kSteps; ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    const auto& ids = batches[i][0];
    const auto& targets = batches[i][1];
    plain->train();
    plain_optimizer.zero_grad();
    const auto expected = plain_backward(parameters, kReplicas, kMicrobatches, [&](int m) {
      const KeyedRandom random(kSeed, "step 0", i, m);
      return cross_entropy(plain(part(ids, kCount, m)), part(targets, kCount, m));
    });
    model->train();
    optimizer.zero_grad();
    const auto losses =
        train(part(ids, kReplicas, dp_rank()), part(targets, kReplicas, dp_rank())).outputs();
    const int first = dp_rank() * kMicrobatches;
    expect_equal(losses,
                 Tensors(expected.begin() + first, expected.begin() + first + kMicrobatches),
                 "loss");
    const auto plain_named = to_map(plain->named_parameters());
    for (const auto& item : model->local_named_parameters()) {
      expect_equal(item.value().grad(), plain_named.at(item.key()).grad(),
                   "gradient of " + item.key());
    }
    plain_optimizer.step();
    optimizer.step();

    plain->eval();
    model->eval();
    torch::NoGradGuard no_grad;
    const auto few = batches[0][0].narrow(0, 0, 2);
    const Tensors wanted = {plain(part(few, 2, 0)), plain(part(few, 2, 1))};
    expect_equal(evaluate(few).outputs(), wanted, "evaluation");
  }
  expect_equal(to_map(model->state_dict()), state_of(*plain), "weight");
  // Tensors that other stages own hold no data here, except a replica of the tied weight, and are
  // absent.
  const auto local = to_map(model->local_named_parameters());
  size_t elsewhere = 0;
  for (const auto& item : model->named_parameters()) {
    if (local.count(item.key()) != 0) continue;
    ++elsewhere;
    EXPECT_TRUE(graph::is_absent(item.value())) << item.key();
    EXPECT_TRUE(graph::is_absent(item.value().grad())) << item.key();
    if (!item.value().is_same(net->head)) {
      EXPECT_EQ(item.value().storage().nbytes(), 0u) << item.key();
    }
  }
  EXPECT_GT(elsewhere, 2u);
}

TEST_F(MpiStep, DataParallelProcessGroupReduces) {
  const auto replicas = group(CommGroup::kDp).process_group();
  ASSERT_EQ(replicas->getSize(), 2);
  std::vector<at::Tensor> tensors = {torch::full({3}, static_cast<float>(rank()))};
  replicas->allreduce(tensors)->wait();
  // Ranks p and p + 2 of stage p.
  expect_equal(tensors[0], torch::full({3}, 2.0f * pp_rank() + 2.0f), "sum");
}

}  // namespace
}  // namespace smp::testing
