// SPDX-License-Identifier: Apache-2.0
// The operators of tensor parallelism are captured as one operator each, with and without data, and
// replayed.

#include "graph/split_backward.h"
#include "smp/nn.h"
#include "tests/graph/checkpointed.h"
#include "tests/graph/harness.h"
#include "tests/nn/harness.h"

namespace smp::nn::testing {
namespace {

using graph::testing::backward;
using torch::Tensor;

/// Goes through all operators. Its parameters are those of a rank of two.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    words = register_parameter("words", torch::randn({kWords / 2, kWidth}));
    up = register_parameter("up", torch::randn({kWidth, kWidth}));
    shift = register_parameter("shift", torch::randn({kWidth}));
  }

  std::vector<Tensor> forward(const Tensor& ids) {
    Tensor x = reduce_from_group(divided_embedding(words, ids, kWords));  // [N, S, W]
    x = divided_dropout(torch::relu(torch::matmul(copy_to_group(x), up)), 0.3, true, -1, 2);
    x = reduce_scatter_from_group(torch::matmul(x, up.t()), 1);
    x = divided_dropout(torch::tanh(x), 0.2, is_training(), 1);
    x = reduce_scatter_from_group(gathered_linear(x, up, shift, 1), 1);
    x = all_gather_to_group(x, 1);
    x = gather_from_group(scatter_to_group(reduce_from_group(x), 2, 2) * 2, 2, 2);
    x = scatter_to_group(x, 0);
    x = all_to_all_in_group(all_to_all_in_group(x, 1, 0), 0, 1);
    const Tensor logits = torch::matmul(copy_to_group(gather_from_group(x, 0)), words.t());
    auto loss = divided_cross_entropy(logits.flatten(0, 1), ids.flatten(), std::nullopt,
                                      at::Reduction::Mean, -100, 0.1);
    return {logits, loss};
  }

  static constexpr int64_t kWords = 12, kWidth = 8;
  Tensor words, up, shift;
};
TORCH_MODULE(Net);

/// The ranks' modules, made one after the other: they share the generator.
std::vector<Net> make_nets() {
  torch::manual_seed(1);
  return {Net(), Net()};
}

graph::testing::Function function_of(Net net) {
  return [net](const Tensors& in) mutable -> Tensors {
    auto out = net(in[0]);
    backward(out[1]);
    return out;
  };
}

TEST(Capture, OperatorsReplayWithTheirGradientsAndMasks) {
  const auto nets = make_nets();
  const auto ids = torch::randint(12, {4, 6}), fresh = torch::randint(12, {4, 6});
  on_ranks(2, [&](int rank) {
    Net net = nets[rank];
    graph::testing::expect_replay_equals_eager(*net, {ids}, {fresh}, function_of(net));
  });
}

TEST(Capture, OperatorsRunAgainInTheBackwardPass) {
  const auto nets = make_nets();
  std::vector<Tensors> microbatches;
  for (int m = 0; m < 2; ++m) microbatches.push_back({torch::randint(12, {4, 6})});
  on_ranks(2, [&](int rank) {
    Net net = nets[rank];
    graph::testing::expect_eager_bits(*net, microbatches, function_of(net));
  });
}

/// A linear layer on slices, whose parameters are those of a rank of two.
struct SlicedImpl : torch::nn::Module {
  SlicedImpl() {
    weight = register_parameter("weight", torch::randn({6, 8}));
    bias = register_parameter("bias", torch::randn({6}));
  }

  std::vector<Tensor> forward(const Tensor& x) {
    Tensor y;
    {
      const Autocast autocast;
      y = gathered_linear(x, weight, bias, 1);
    }
    return {y, reduce_from_group(y.to(torch::kFloat).square().sum())};
  }

  Tensor weight, bias;
};
TORCH_MODULE(Sliced);

TEST(Capture, GatheredProductsReplayUnderAutocast) {
  torch::manual_seed(3);
  const std::vector<Sliced> nets{Sliced(), Sliced()};
  const auto x = torch::randn({2, 3, 8}), fresh = torch::randn({2, 3, 8});
  on_ranks(2, [&](int rank) {
    Sliced net = nets[rank];
    const auto function = [&](const Tensors& in) {
      const auto out = net(in[0]);
      backward(out[1]);
      return out;
    };
    graph::testing::expect_replay_equals_eager(*net, {x}, {fresh}, function);
    const auto traced = graph::testing::trace(graph::testing::table_of(*net), {x}, function);
    const auto& op = traced.recorded->operators.front();
    EXPECT_EQ(op.name(), "smp::tp_gathered_linear");
    EXPECT_EQ(traced.recorded->values[op.results[0]].meta.dtype, torch::kBFloat16);
  });
}

/// The two halves of a backward pass communicate in their turn, and give the results of one pass.
TEST(Capture, BackwardPassesCanBeSplit) {
  const auto nets = make_nets();
  const auto ids = torch::randint(12, {4, 6});
  on_ranks(2, [&](int rank) {
    Net net = nets[rank];
    graph::testing::Checkpointed step(*net, {ids}, function_of(net));
    step.set_regions([](int) { return -1; });
    auto whole = step.forward({ids}, {});
    const auto expected = graph::testing::Checkpointed::backward(whole);
    auto run = step.forward({ids}, {});
    std::unique_ptr<graph::SplitBackward> split;
    {
      const auto starts = std::move(run.starts);
      split = std::make_unique<graph::SplitBackward>(
          starts, run.gradients, std::vector<graph::GradientSinkPtr>{run.sinks.at("words")});
    }
    split->run_weights();
    graph::testing::expect_equal(graph::testing::Checkpointed::gradients(run), expected,
                                 "gradient");
  });
}

/// Modules, with states divided along the sequence and with whole ones.
TEST(Capture, ALanguageModelReplays) {
  torch::manual_seed(2);
  const auto make_tokens = [] { return torch::randint(12, {3, 6}); };
  const Tensors first{make_tokens(), make_tokens()}, fresh{make_tokens(), make_tokens()};
  for (const auto* optimize : {"speed", "memory"}) {
    on_ranks(2, [&](int) {
      DistributedTransformerLMHead model{nullptr};
      make_in_turn([&] {
        model = DistributedTransformerLMHead(DistributedTransformerLMHeadOptions()
                                                 .num_layers(2)
                                                 .num_attention_heads(2)
                                                 .attention_head_size(4)
                                                 .hidden_size(8)
                                                 .intermediate_size(12)
                                                 .vocab_size(12)
                                                 .num_positions(6)
                                                 .causal_mask_size(6)
                                                 .use_alibi(true)
                                                 .pre_layernorm(true)
                                                 .optimize(optimize));
      });
      graph::testing::expect_replay_equals_eager(
          *model, first, fresh, [&](const Tensors& in) -> Tensors {
            const auto loss =
                model->forward(DistributedTransformerLMHeadImpl::Five{in[0], {}, {}, {}, in[1]});
            backward(loss);
            return {loss};
          });
    });
  }
}

TEST(Capture, EachIsOneOperator) {
  const auto nets = make_nets();
  const auto ids = torch::randint(12, {4, 6});
  on_ranks(2, [&](int rank) {
    Net net = nets[rank];
    const auto table = graph::testing::table_of(*net);
    const auto traced = graph::testing::trace(table, {ids}, function_of(net));
    std::vector<std::string> names, random;
    for (const auto& op : traced.recorded->operators) {
      if (op.name().rfind("smp::", 0) == 0) names.push_back(op.name());
      if (op.random_ordinal >= 0) {
        random.push_back(op.name() + " " + std::to_string(op.random_ordinal));
      }
    }
    EXPECT_EQ(names, (std::vector<std::string>{
                         "smp::tp_embedding", "smp::tp_reduce", "smp::tp_copy", "smp::tp_dropout",
                         "smp::tp_reduce_scatter", "smp::tp_dropout", "smp::tp_gathered_linear",
                         "smp::tp_reduce_scatter", "smp::tp_all_gather", "smp::tp_reduce",
                         "smp::tp_scatter", "smp::tp_gather", "smp::tp_scatter",
                         "smp::tp_all_to_all", "smp::tp_all_to_all", "smp::tp_gather",
                         "smp::tp_copy", "smp::tp_cross_entropy"}));
    EXPECT_EQ(random, (std::vector<std::string>{"smp::tp_dropout 0", "smp::tp_dropout 1"}));
    expect_has(traced.recorded->to_string(),
               {"smp::tp_scatter(", "smp::tp_all_to_all(", "smp::tp_cross_entropy("});
  });
}

/// Rank 1 does not take part: a capture on shapes must not communicate.
TEST(Capture, OnShapesGivesTheSameGraphAndMovesNothing) {
  const auto nets = make_nets();
  const auto ids = torch::randint(12, {4, 6});
  on_ranks(2, [&](int rank) {
    Net net = nets[rank];
    const auto table = graph::testing::table_of(*net);
    const auto with_data = graph::testing::trace(table, {ids}, function_of(net));
    if (rank == 1) return;
    const auto on_shapes = graph::testing::trace(table, {ids}, function_of(net), /*execute=*/false);
    EXPECT_EQ(on_shapes.recorded->to_string(), with_data.recorded->to_string());
    const auto& values = with_data.recorded->values;
    ASSERT_EQ(on_shapes.recorded->values.size(), values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(on_shapes.recorded->values[i].meta.to_string(), values[i].meta.to_string());
      EXPECT_EQ(on_shapes.recorded->values[i].meta.strides, values[i].meta.strides);
    }
  });
}

TEST(Capture, ChangeOfADropoutProbabilityIsSeen) {
  const auto ids = torch::randint(12, {4, 6});
  const auto nets = make_nets();
  on_ranks(2, [&](int rank) {
    Net net = nets[rank];
    const auto table = graph::testing::table_of(*net);
    const auto first = graph::testing::trace(table, {ids}, function_of(net));
    net->eval();
    const auto second = graph::testing::trace(table, {ids}, function_of(net), /*execute=*/false,
                                              {first.recorded.get()});
    ASSERT_EQ(second.match, nullptr);
    expect_has(second.difference, {"smp::tp_dropout"});
  });
}

}  // namespace
}  // namespace smp::nn::testing
