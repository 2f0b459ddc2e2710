// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <optional>

#include "smp/smp.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kWidth = 6;

// ---- Tensors pinned by a scope around construction
// ----------------------------------------------------

/// Registers parameters in every way that modules do.
struct AssortedImpl : torch::nn::Module {
  AssortedImpl() {
    const auto scope = smp::partition(1);
    linear = register_module("linear", torch::nn::Linear(3, 3));
    conv = register_module("conv", torch::nn::Conv2d(1, 2, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    lstm = register_module("lstm", torch::nn::LSTM(3, 3));
    made = register_parameter("made", torch::randn({3, 3}) * 0.1);
    literal = register_parameter("literal", torch::tensor({1.0f, 2.0f}));
    halved = register_buffer("halved", torch::ones({4}).div_(2));
  }

  torch::nn::Linear linear{nullptr};
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::Tensor made, literal, halved;
};
TORCH_MODULE(Assorted);

TEST(PartitionScope, PinsWhatIsMadeInsideHoweverItIsRegistered) {
  Assorted net;
  for (const auto& item : net->named_parameters()) {
    EXPECT_EQ(pinned_partition(item.value()), 1) << item.key();
  }
  for (const auto& item : net->named_buffers()) {
    EXPECT_EQ(pinned_partition(item.value()), 1) << item.key();
  }
  net->to(torch::kDouble);
  EXPECT_EQ(pinned_partition(net->linear->weight), 1) << "moved to another storage";
  EXPECT_EQ(pinned_partition(torch::nn::Linear(2, 2)->weight), -1);
}

TEST(PartitionScope, LeavesConstructionAsItIs) {
  torch::manual_seed(3);
  const auto plain = state_of(*torch::nn::Linear(5, 4));
  torch::manual_seed(3);
  const auto scope = smp::partition(0);
  expect_equal(state_of(*torch::nn::Linear(5, 4)), plain, "value");
}

TEST(PartitionScope, TheInnermostWins) {
  const auto outer = smp::partition(2);
  const auto before = torch::nn::Linear(2, 2);
  std::optional<torch::nn::Linear> inside;
  {
    const auto inner = smp::partition(0);
    inside.emplace(2, 2);
  }
  const auto after = torch::nn::Linear(2, 2);
  EXPECT_EQ(pinned_partition(before->weight), 2);
  EXPECT_EQ(pinned_partition((*inside)->weight), 0);
  EXPECT_EQ(pinned_partition(after->weight), 2);
}

TEST(PartitionScope, SetPartitionPinsAModuleAfterwards) {
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
  set_partition(net, 3);
  for (const auto& tensor : net->parameters()) EXPECT_EQ(pinned_partition(tensor), 3);
  for (const auto& tensor : net->buffers()) EXPECT_EQ(pinned_partition(tensor), 3);
  set_partition(*net->ptr(0), 1);
  EXPECT_EQ(pinned_partition(net->parameters()[0]), 1);
  EXPECT_EQ(pinned_partition(net->parameters()[2]), 3);
}

TEST(PartitionScope, Misuse) {
  expect_has(error_of<UsageError>([] { const auto scope = smp::partition(-1); }),
             {"smp::partition: expected a partition from 0 on, got -1"});
  torch::nn::ReLU relu;
  expect_has(error_of<UsageError>([&] { set_partition(relu, 0); }),
             {"module torch::nn::ReLUImpl has neither parameters nor buffers",
              "Put a scope around its call in forward: const auto scope = smp::partition(0);"});
  expect_has(
      error_of_run<UsageError>(2, stages(2), [] { const auto scope = smp::partition(2); }),
      {"there is no partition 2: the configuration has \"partitions\": 2, so they are 0 to 1"});
}

// ---- Training with pins ------------------------------------------------------------------------

/// Two layers on partition 0 around two on partition 1, with dropout and a skip over the middle:
/// the pipeline visits 0, 1 and 0 again. `pins` false: an ordinary module.
struct SandwichImpl : torch::nn::Module {
  explicit SandwichImpl(bool pins) : pins(pins) {
    first = make("first", 0);
    second = make("second", 1);
    third = make("third", 1);
    last = make("last", 0);
    drop = register_module("drop", torch::nn::Dropout(0.3));
  }

  torch::nn::Linear make(const char* name, int partition) {
    std::optional<PartitionScope> scope;
    if (pins) scope.emplace(partition);
    return register_module(name, torch::nn::Linear(kWidth, kWidth));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(first(x));
    auto y = drop(torch::tanh(second(x)));
    y = third(y).relu_();
    return last(drop(x + y));
  }

  bool pins;
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr}, last{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Sandwich);

/// A tied layer on partition 0, used on both sides of a layer of partition 1 and, through a scope
/// in forward, by operators of partition 1.
struct TiedSandwichImpl : torch::nn::Module {
  explicit TiedSandwichImpl(bool pins) : pins(pins) {
    tied = register_module("tied", torch::nn::Linear(kWidth, kWidth));
    middle = register_module("middle", torch::nn::Linear(kWidth, kWidth));
    if (pins) {
      set_partition(tied, 0);
      set_partition(middle, 1);
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(tied(x));
    x = torch::tanh(middle(x));
    {
      std::optional<PartitionScope> scope;
      if (pins) scope.emplace(1);
      x = torch::softmax(x * 2, 1) + x;
    }
    return tied(x);
  }

  bool pins;
  torch::nn::Linear tied{nullptr}, middle{nullptr};
};
TORCH_MODULE(TiedSandwich);

struct Case {
  int ranks;
  int replicas;
  int microbatches;
  std::string pipeline;
  bool automatic;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.ranks << " x " << c.replicas << ", " << c.microbatches << " microbatches, "
             << c.pipeline << (c.automatic ? ", automatic" : ", manual");
}

template <class Net>
void expect_parity(const Case& c) {
  torch::manual_seed(5);
  Net plain(/*pins=*/false);
  torch::manual_seed(6);
  std::vector<torch::Tensor> x, y;
  constexpr int kSteps = 3;
  const int64_t batch = 4 * c.microbatches;
  for (int step = 0; step < kSteps; ++step) {
    x.push_back(torch::randn({batch * c.replicas, kWidth}));
    y.push_back(torch::randn({batch * c.replicas, kWidth}));
  }
  std::mutex mutex;
  Named weights;
  std::vector<std::map<int, Tensors>> losses(kSteps);  // losses by step; by replica
  const auto config = stages(c.ranks)
                          .microbatches(c.microbatches)
                          .pipeline(c.pipeline)
                          .ddp(c.replicas > 1)
                          .auto_partition(c.automatic)
                          .default_partition(0);
  run_as_threads(c.ranks * c.replicas, config, [&] {
    Net net(/*pins=*/true);
    copy_values(*plain, *net);
    DistributedModel<Net> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                      torch::optim::SGDOptions(0.1).momentum(0.9));
    auto train = make_training(model);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const auto loss = train(x[step].chunk(c.replicas)[dp_rank()].clone(),
                              y[step].chunk(c.replicas)[dp_rank()].clone());
      optimizer.step();
      const std::lock_guard<std::mutex> lock(mutex);
      losses[step][dp_rank()] = loss.outputs();
    }
    const auto state = to_map(model->state_dict());
    const std::lock_guard<std::mutex> lock(mutex);
    if (rank() == 0) weights = state;
  });
  torch::optim::SGD optimizer(unique_parameters(*plain),
                              torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const int count = c.replicas * c.microbatches;
    const auto expected =
        plain_backward(unique_parameters(*plain), c.replicas, c.microbatches, [&](int m) {
          const KeyedRandom random(kSeed, "step 0", step, m);
          return torch::mse_loss(plain(part(x[step], count, m)), part(y[step], count, m));
        });
    optimizer.step();
    Tensors got;
    for (const auto& [replica, outputs] : losses[step]) {
      got.insert(got.end(), outputs.begin(), outputs.end());
    }
    expect_equal(got, expected, "loss of step " + std::to_string(step));
  }
  expect_equal(weights, state_of(*plain), "weight");
}

class ManualPartition : public ::testing::TestWithParam<Case> {};

TEST_P(ManualPartition, AStageVisitedTwiceTrainsAsOneProcess) {
  expect_parity<Sandwich>(GetParam());
}

TEST_P(ManualPartition, ATiedLayerOnBothVisitsTrainsAsOneProcess) {
  expect_parity<TiedSandwich>(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Layouts, ManualPartition,
                         ::testing::Values(Case{2, 1, 1, "simple", false},
                                           Case{2, 1, 4, "interleaved", false},
                                           Case{2, 1, 4, "simple", false},
                                           Case{2, 2, 3, "interleaved", false},
                                           Case{2, 1, 4, "interleaved", true}));

/// The bytes that the operator keeps for its backward, once, are those that the plan takes off
/// where they are made.
TEST(Placements, BothResultsOfAnOperatorGoToAnotherStage) {
  torch::set_num_threads(1);
  Mlp prototype(4);
  const auto x = torch::randn({8, MlpImpl::kWidth});
  const auto loss_of = [](const torch::Tensor& part_of_x, const torch::Tensor& values,
                          const torch::Tensor& indices) {
    return (part_of_x.matmul(values) * indices.to(torch::kFloat).sum(0)).sum();
  };
  Tensors expected;
  for (int m = 0; m < 2; ++m) {
    const auto [values, indices] = prototype->in->weight.sort(1);
    expected.push_back(loss_of(part(x, 2, m), values, indices).detach());
  }
  run_as_threads(2, stages(2).auto_partition(false).default_partition(0).pipeline("zb_h1"), [&] {
    Mlp net(4);
    copy_values(*prototype, *net);
    DistributedModel<Mlp> model(net);
    auto train = step([&](torch::Tensor part_of_x) {
      const auto [values, indices] = net->in->weight.sort(1);
      const auto scope = partition(1);
      const auto loss = loss_of(part_of_x, values, indices);
      model->backward(loss);
      return loss;
    });
    expect_equal(train(x).outputs(), expected, "loss");
  });
}

TEST(Placements, TellWhereEverythingWentAndWhy) {
  const torch::Tensor x = torch::randn({4, kWidth});
  run_as_threads(2, stages(2).auto_partition(false).default_partition(1), [&] {
    Sandwich net(true);
    DistributedModel<Sandwich> model(net);
    EXPECT_THAT(error_of<UsageError>([&] { get_partition(net->first->weight); }),
                HasSubstr("smp::get_partition was called before the first step, which partitions "
                          "the models; use register_post_partition_hook"));
    make_training(model)(x, x.tanh());
    const Placement first = get_partition(net->first->weight);
    EXPECT_EQ(first.name, "first.weight");
    EXPECT_EQ(first.partition, 0);
    EXPECT_THAT(first.reason, HasSubstr("operator 0 (aten::t) uses it"));
    EXPECT_THAT(first.reason, HasSubstr("pinned"));
    EXPECT_EQ(get_partition(net->second->bias).partition, 1);
    EXPECT_THAT(
        explain_partition(),
        HasSubstr("operator 0 (aten::t) in first: partition 0, parameter first.weight is pinned to "
                  "partition 0"));
    EXPECT_EQ(get_partition(net->last->weight).partition, 0);
    EXPECT_THAT(error_of<UsageError>([] {
                  get_partition(torch::ones({2, 3}));
                }),
                HasSubstr("the tensor of shape [2, 3] is no parameter or buffer of a "
                          "DistributedModel"));
    EXPECT_THAT(error_of<UsageError>([&] { set_partition(net, 1); }),
                HasSubstr("smp::set_partition was called after the first step"));
  });
}

}  // namespace
}  // namespace smp::testing
