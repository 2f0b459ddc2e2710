// SPDX-License-Identifier: Apache-2.0
// The layers of a transformer, against plain functions of libtorch.

#include <algorithm>
#include <cmath>
#include <sstream>

#include "graph/keyed_random.h"
#include "smp/nn.h"
#include "tests/nn/transformer_cases.h"

namespace smp::nn::testing {
namespace {

DistributedTransformerLayerOptions options_of(const Case& test,
                                              const std::optional<std::string>& optimize) {
  return DistributedTransformerLayerOptions()
      .num_attention_heads(kHeads)
      .attention_head_size(kChannels)
      .hidden_size(kHidden)
      .intermediate_size(kInner)
      .attention_dropout_prob(test.attention_dropout)
      .hidden_dropout_prob(test.dropout)
      .activation(test.activation)
      .causal_mask_size(test.causal ? std::optional(kLength) : std::nullopt)
      .add_cross_attention(test.cross)
      .pre_layernorm(test.pre)
      .post_layernorm(test.post)
      .use_alibi(test.alibi)
      .optimize(optimize);
}

struct Inputs {
  Tensor hidden, cross, mask, cross_mask, of_result;
};

Inputs inputs_of(const Case& test, torch::Dtype dtype = torch::kDouble) {
  torch::manual_seed(1);
  Inputs inputs;
  inputs.hidden = torch::randn({kBatch, test.length, kHidden}, torch::kDouble).to(dtype);
  inputs.of_result = torch::randn({kBatch, test.length, kHidden}, torch::kDouble).to(dtype);
  const auto cross = torch::randn({kBatch, kCross, kHidden}, torch::kDouble).to(dtype);
  const auto mask = torch::randn({kBatch, 1, 1, kLength}, torch::kDouble).to(dtype);
  const auto cross_mask = torch::randn({kBatch, 1, 1, kCross}, torch::kDouble).to(dtype);
  if (test.cross) inputs.cross = cross;
  if (test.mask) inputs.mask = mask;
  if (test.mask && test.cross) inputs.cross_mask = cross_mask;
  return inputs;
}

/// The output, and the gradients of the states that came in.
Tensors backward_of(const Tensor& result, const Inputs& inputs, const Tensor& hidden,
                    const Tensor& cross) {
  result.backward(inputs.of_result);
  Tensors found{result.detach(), hidden.grad()};
  if (cross.defined()) found.push_back(cross.grad());
  return found;
}

Outcome run_layer(const Case& test, int ranks, const std::optional<std::string>& optimize,
                  torch::Dtype dtype = torch::kDouble) {
  const Inputs inputs = inputs_of(test, dtype);
  return run_module<DistributedTransformerLayer>(
      ranks, [&] { return DistributedTransformerLayer(options_of(test, optimize)); },
      [&](DistributedTransformerLayer& layer) {
        layer->train(test.train);
        const Tensor hidden = inputs.hidden.clone().requires_grad_();
        if (!test.cross) {
          const auto [result, mask] =
              layer->forward(DistributedTransformerLayerImpl::Pair{hidden, inputs.mask});
          EXPECT_TRUE(mask.is_same(inputs.mask));
          return backward_of(result, inputs, hidden, {});
        }
        const Tensor cross = inputs.cross.clone().requires_grad_();
        const auto [result, same, mask, cross_mask] = layer->forward(
            DistributedTransformerLayerImpl::Four{hidden, cross, inputs.mask, inputs.cross_mask});
        EXPECT_TRUE(same.is_same(cross));
        EXPECT_TRUE(mask.is_same(inputs.mask));
        EXPECT_TRUE(cross_mask.is_same(inputs.cross_mask));
        return backward_of(result, inputs, hidden, cross);
      },
      dtype);
}

void expect_as_plain(const Case& test, const Outcome& outcome, const std::string& what,
                     double relative, torch::Dtype dtype = torch::kDouble) {
  const Inputs inputs = inputs_of(test, dtype);
  Named parameters = leaves(outcome.parameters);
  const Plain plain = plain_of(test, parameters);
  const Tensor hidden = inputs.hidden.clone().requires_grad_();
  const Tensor cross = test.cross ? inputs.cross.clone().requires_grad_() : Tensor();
  Tensors expected;
  {
    const graph::KeyedRandomScope random({3, 0, 1, 2});
    expected = backward_of(plain.layer(hidden, cross, inputs.mask, inputs.cross_mask, ""), inputs,
                           hidden, cross);
  }
  expect_close(outcome, expected, gradients_of(parameters), what, relative);
}

TEST(TransformerLayer, IsThatOfPlainLibtorch) {
  for (const Case& test : layer_cases()) {
    for (const int ranks : {1, 2, 4}) {
      for (const auto* optimize : {"speed", "memory"}) {
        expect_as_plain(test, run_layer(test, ranks, optimize),
                        c10::str(test.name, " on ", ranks, " ranks, ", optimize), 1e-12);
      }
    }
  }
}

TEST(TransformerLayer, InFloat32IsWithinRounding) {
  for (const int i : {1, 7}) {
    const Case test = layer_cases()[i];
    for (const int ranks : {1, 2, 4}) {
      expect_as_plain(test, run_layer(test, ranks, "memory", torch::kFloat),
                      c10::str(test.name, " on ", ranks, " ranks"), 1e-5, torch::kFloat);
    }
  }
}

TEST(TransformerLayer, RunsAreTheSameAmongThemselves) {
  const Case test = layer_cases()[7];
  const Outcome first = run_layer(test, 4, "memory", torch::kFloat);
  const Outcome second = run_layer(test, 4, "memory", torch::kFloat);
  for (size_t i = 0; i < first.outputs.size(); ++i) {
    expect_equal(second.outputs[i], first.outputs[i], "output");
  }
  ASSERT_EQ(second.gradients.size(), first.gradients.size());
  for (const auto& [name, gradient] : first.gradients) {
    expect_equal(second.gradients.at(name), gradient, name);
  }
}

TEST(TransformerLayer, BeginsWithTheSameValuesForAllDegrees) {
  for (const bool normal : {false, true}) {
    const std::function<DistributedTransformerLayer()> make = [&] {
      return DistributedTransformerLayer(
          options_of(Case(), "speed").use_normal_initialization(normal));
    };
    const auto none = [](DistributedTransformerLayer&) { return Tensors(); };
    const Outcome one = run_module<DistributedTransformerLayer>(1, make, none);
    for (const int ranks : {2, 4}) {
      const Outcome divided = run_module<DistributedTransformerLayer>(ranks, make, none);
      ASSERT_EQ(divided.parameters.size(), one.parameters.size());
      for (const auto& [name, value] : one.parameters) {
        expect_equal(divided.parameters.at(name), value, name);
      }
    }
    const double deviation = one.parameters.at("output.dense1.weight").std().item<double>();
    EXPECT_NEAR(deviation, normal ? 0.02 : 1 / std::sqrt(3 * kHidden), 0.1 * deviation);
  }
}

/// The calls of collectives by rank 0 in a forward and backward pass.
std::vector<std::string> moved(const Case& test, const std::optional<std::string>& optimize,
                               int64_t* elements) {
  const Outcome outcome = run_layer(test, 2, optimize);
  *elements = outcome.groups[0]->elements();
  return outcome.groups[0]->calls();
}

int64_t count_of(const std::vector<std::string>& calls, const char* name) {
  return std::count(calls.begin(), calls.end(), name);
}

TEST(TransformerLayer, MovesWhatTheFormulaSays) {
  constexpr int64_t kStates = kBatch * kLength * kHidden;
  int64_t elements = 0;
  const Case test = layer_cases()[1];
  // Two sums each way, of whole states.
  EXPECT_EQ(moved(test, "speed", &elements), std::vector<std::string>(4, "all_reduce"));
  EXPECT_EQ(elements, 4 * kStates);
  const auto calls = moved(test, "memory", &elements);
  // Forward, two gathers of a half and two reductions of a whole, and the gather at the end;
  // backward their reverse, where the scatter at the beginning is a gather, and the two gathers of
  // the forward pass again.
  EXPECT_EQ(count_of(calls, "all_gather"), 2 + 1 + 2 + 1 + 2);
  EXPECT_EQ(count_of(calls, "reduce_scatter"), 2 + 2);
  // And the gradients of two norms' weights and biases, and of the two biases after sums.
  EXPECT_EQ(count_of(calls, "all_reduce"), 6);
  EXPECT_EQ(elements, 8 * kStates / 2 + 4 * kStates + 6 * kHidden);
}

/// States of cross attention are gathered for their product, forward and backward; their gradient
/// is summed, and gathered for the whole that was given.
TEST(TransformerLayer, SlicesTheStatesOfCrossAttention) {
  constexpr int64_t kStates = kBatch * kLength * kHidden, kOther = kBatch * kCross * kHidden;
  Case test;
  test.cross = true;
  int64_t elements = 0;
  EXPECT_EQ(moved(test, "speed", &elements), std::vector<std::string>(7, "all_reduce"));
  EXPECT_EQ(elements, 6 * kStates + kOther);
  const auto calls = moved(test, "memory", &elements);
  EXPECT_EQ(count_of(calls, "all_gather"), 3 + 1 + 3 + 1 + 3 + 3);
  EXPECT_EQ(count_of(calls, "reduce_scatter"), 3 + 3 + 1);
  EXPECT_EQ(count_of(calls, "all_reduce"), 9);
  EXPECT_EQ(elements, 11 * kStates / 2 + 6 * kStates + 3 * kOther / 2 + kOther + 9 * kHidden);
}

TEST(TransformerLayer, FollowsTheConfigurationWhereItsOptionsSayNothing) {
  const Case test = layer_cases()[1];
  int64_t elements = 0;
  const auto memory = moved(test, "memory", &elements);
  EXPECT_EQ(moved(test, std::nullopt, &elements), memory);  // without a runtime
  for (const char* configured : {"speed", "memory"}) {
    set_default_optimize([=] { return configured; });
    EXPECT_EQ(moved(test, std::nullopt, &elements), moved(test, configured, &elements));
    EXPECT_EQ(moved(test, "memory", &elements), memory);
  }
  set_default_optimize(nullptr);
}

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// A sequence that the ranks do not divide is no error of the configuration: such a call runs as
/// with "speed", and the first one says so. (No other test calls this module with such a sequence.)
TEST(TransformerLayer, IsWholeForASequenceThatTheRanksDoNotDivide) {
  Case test = layer_cases()[1];
  test.length = 7;
  const Outcome expected = run_layer(test, 2, "speed");
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) {
    const Outcome outcome = run_layer(test, 2, std::nullopt);
    EXPECT_EQ(outcome.groups[0]->calls(), expected.groups[0]->calls());
    expect_equal(outcome.outputs[0], expected.outputs[0], "output");
    ASSERT_EQ(outcome.gradients.size(), expected.gradients.size());
    for (const auto& [name, gradient] : expected.gradients) {
      expect_equal(outcome.gradients.at(name), gradient, name);
    }
    expect_as_plain(test, outcome, "a sequence of 7", 1e-12);
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(count_of(log,
                     "warning: DistributedTransformerLayer: a sequence of 7 tokens cannot be "
                     "divided among the 2 ranks of the tensor-parallel group, so such calls run as "
                     "with optimize(\"speed\")"),
            1)
      << log;
}

/// Several layers, called by the convention of one.
TEST(Transformer, IsLayersOneAfterTheOther) {
  for (const bool cross : {false, true}) {
    Case test;
    test.cross = cross;
    test.mask = true;
    const Inputs inputs = inputs_of(test);
    for (const auto* optimize : {"speed", "memory"}) {
      const auto options = DistributedTransformerOptions()
                               .num_layers(2)
                               .num_attention_heads(kHeads)
                               .attention_head_size(kChannels)
                               .hidden_size(kHidden)
                               .intermediate_size(kInner)
                               .attention_dropout_prob(0)
                               .hidden_dropout_prob(0)
                               .add_cross_attention(cross)
                               .optimize(optimize);
      const Outcome outcome = run_module<DistributedTransformer>(
          2, [&] { return DistributedTransformer(options); },
          [&](DistributedTransformer& model) {
            const Tensor hidden = inputs.hidden.clone().requires_grad_();
            if (!cross) {
              return backward_of(std::get<0>(model->forward(
                                     DistributedTransformerImpl::Pair{hidden, inputs.mask})),
                                 inputs, hidden, {});
            }
            const Tensor states = inputs.cross.clone().requires_grad_();
            return backward_of(std::get<0>(model->forward(DistributedTransformerImpl::Four{
                                   hidden, states, inputs.mask, inputs.cross_mask})),
                               inputs, hidden, states);
          });
      Named parameters = leaves(outcome.parameters);
      const Plain plain = plain_of(test, parameters);
      const Tensor hidden = inputs.hidden.clone().requires_grad_();
      const Tensor states = cross ? inputs.cross.clone().requires_grad_() : Tensor();
      const auto layer = [&](const Tensor& x, const char* name) {
        return plain.layer(x, states, inputs.mask, inputs.cross_mask, name);
      };
      const Tensors expected = backward_of(layer(layer(hidden, "seq_layers.0."), "seq_layers.1."),
                                           inputs, hidden, states);
      expect_close(outcome, expected, gradients_of(parameters), optimize);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Attention and output layers on their own

TEST(AttentionLayer, IsThatOfPlainLibtorch) {
  for (const bool cross : {false, true}) {
    Case test;
    test.cross = cross;
    test.mask = true;
    test.causal = true;
    const Inputs inputs = inputs_of(test);
    const auto options = DistributedAttentionLayerOptions()
                             .num_attention_heads(kHeads)
                             .attention_head_size(kChannels)
                             .hidden_size(kHidden)
                             .attention_dropout_prob(0)
                             .hidden_dropout_prob(0)
                             .causal_mask_size(kLength)
                             .cross_attention(cross);
    for (const int ranks : {1, 2, 4}) {
      const Outcome outcome = run_module<DistributedAttentionLayer>(
          ranks, [&] { return DistributedAttentionLayer(options); },
          [&](DistributedAttentionLayer& layer) {
            const Tensor hidden = inputs.hidden.clone().requires_grad_();
            const Tensor mask = (cross ? inputs.cross_mask : inputs.mask).clone().requires_grad_();
            const Tensor states = cross ? inputs.cross.clone().requires_grad_() : Tensor();
            const Tensor result = cross ? layer->forward(std::make_tuple(hidden, states, mask))
                                        : layer->forward(std::make_tuple(hidden, mask));
            Tensors found = backward_of(result, inputs, hidden, states);
            found.push_back(mask.grad());
            return found;
          });
      Named with_prefix;
      for (const auto& [name, tensor] : outcome.parameters) with_prefix["a." + name] = tensor;
      Named parameters = leaves(with_prefix);
      const Plain plain = plain_of(test, parameters);
      const Tensor hidden = inputs.hidden.clone().requires_grad_();
      const Tensor states = cross ? inputs.cross.clone().requires_grad_() : Tensor();
      const Tensor mask = (cross ? inputs.cross_mask : inputs.mask).clone().requires_grad_();
      Tensors expected =
          backward_of(plain.attention(hidden, states, mask, "a"), inputs, hidden, states);
      expected.push_back(mask.grad());
      Named gradients;
      for (const auto& [name, gradient] : gradients_of(parameters)) {
        gradients[name.substr(2)] = gradient;
      }
      expect_close(outcome, expected, gradients, c10::str("attention on ", ranks, " ranks"));
    }
  }
}

/// Heads that are no power of two get every other slope of the next power between those of theirs.
TEST(AttentionLayer, SlopesOfLinearBiases) {
  constexpr int64_t kThree = 3;
  on_ranks(1, [&](int) {
    torch::manual_seed(3);
    DistributedAttentionLayer layer(DistributedAttentionLayerOptions()
                                        .num_attention_heads(kThree)
                                        .attention_head_size(2)
                                        .hidden_size(6)
                                        .hidden_dropout_prob(0)
                                        .use_alibi(true)
                                        .alibi_bias_max(4));
    layer->to(torch::kDouble);
    layer->eval();
    const torch::NoGradGuard no_grad;
    layer->layernorm->bias.zero_();
    const auto x = torch::randn({1, 5, 6}, torch::kDouble);
    const auto qkv = layer->query_key_value(x).view({1, 5, 3, kThree, 2}).permute({2, 0, 3, 1, 4});
    auto scores = torch::matmul(qkv[0], qkv[1].transpose(2, 3)) / std::sqrt(2.0);
    const double slopes[kThree] = {std::exp2(-2), std::exp2(-4), std::exp2(-1)};
    for (int64_t h = 0; h < kThree; ++h) {
      for (int64_t i = 0; i < 5; ++i) {
        for (int64_t j = 0; j < 5; ++j) scores[0][h][i][j] -= slopes[h] * std::abs(i - j);
      }
    }
    const auto context = torch::matmul(scores.softmax(-1), qkv[2]).transpose(1, 2).flatten(2);
    const auto expected = layer->layernorm(x + layer->dense(context));
    expect_close(layer->forward(std::make_tuple(x, Tensor())), expected, "attention");
  });
}

/// Residuals in float32 are not rounded to half precision between blocks.
TEST(OutputLayer, AddsResidualsInFloat32) {
  on_ranks(2, [](int) {
    const auto options = DistributedTransformerOutputLayerOptions()
                             .hidden_size(kHidden)
                             .intermediate_size(kInner)
                             .hidden_dropout_prob(0)
                             .pre_layernorm(true)
                             .post_layernorm(false);
    for (const bool fp32 : {false, true}) {
      auto with = options;
      DistributedTransformerOutputLayer layer{nullptr};
      make_in_turn([&] {
        layer = DistributedTransformerOutputLayer(with.fp32_residual_addition(fp32));
        layer->to(torch::kBFloat16);
      });
      const auto x = torch::arange(2 * kHidden).view({1, 2, kHidden}).to(torch::kBFloat16);
      const auto normed = layer->pre_layernorm(x);
      const auto y = layer->dense2(torch::gelu(layer->dense1(normed)));
      const auto result = layer(x);
      if (!fp32) {
        expect_equal(result, x + y, "in bfloat16");
        continue;
      }
      expect_equal(result, x.to(torch::kFloat) + y.to(torch::kFloat), "in float32");
      EXPECT_FALSE(torch::equal(result.to(torch::kBFloat16).to(torch::kFloat), result));
      EXPECT_EQ(layer(result).scalar_type(), torch::kFloat);  // and go on so
    }
    auto with = options;
    DistributedTransformerOutputLayer last(
        with.fp32_residual_addition(true).pre_layernorm(false).post_layernorm(true));
    last->to(torch::kBFloat16);
    EXPECT_EQ(last(torch::randn({1, 2, kHidden})).scalar_type(), torch::kBFloat16);
  });
}

// ---------------------------------------------------------------------------------------------

TEST(Transformer, SaysWhatItIs) {
  on_ranks(2, [](int) {
    std::ostringstream stream;
    stream << DistributedTransformerLayer(options_of(Case(), "speed"));
    expect_has(stream.str(), {"smp::nn::DistributedTransformerLayer(",
                              "(attention): smp::nn::DistributedAttentionLayer("
                              "num_attention_heads=4, attention_head_size=6, hidden_size=16)",
                              "(output): smp::nn::DistributedTransformerOutputLayer(hidden_size=16"
                              ", intermediate_size=24, activation=gelu)"});
  });
}

TEST(Transformer, SaysWhatIsWrongWithItsOptions) {
  on_ranks(4, [](int) {
    const Case test;
    const auto error = [](const DistributedTransformerLayerOptions& options) {
      return error_of<UsageError>([&] { DistributedTransformerLayer layer(options); });
    };
    expect_has(error(options_of(test, "speed").num_attention_heads(6)),
               {"DistributedAttentionLayer: num_attention_heads 6 cannot be divided among the 4 "
                "ranks of the tensor-parallel group"});
    expect_has(error(options_of(test, "speed").intermediate_size(30)),
               {"DistributedTransformerOutputLayer: intermediate_size 30 cannot be divided"});
    expect_has(error(options_of(test, "speed").post_layernorm(false)),
               {"pre_layernorm and post_layernorm are both false. At least one of them must be "
                "true"});
    expect_has(error(options_of(test, "speed").activation("tanh")),
               {"activation is \"tanh\". Choose \"gelu\", \"gelu_new\" or \"relu\""});
    expect_has(error(options_of(test, "both")),
               {"optimize is \"both\". Choose \"speed\" or \"memory\""});
    expect_has(error_of<UsageError>(
                   [&] { DistributedTransformer(DistributedTransformerOptions().num_layers(0)); }),
               {"DistributedTransformer: num_layers must be 1 or more, got 0"});
  });
}

TEST(Transformer, SaysWhatIsWrongWithItsInputs) {
  on_ranks(2, [](int) {
    using Layer = DistributedTransformerLayerImpl;
    const auto x = torch::randn({kBatch, kLength, kHidden});
    Case causal, cross;
    causal.causal = cross.cross = true;
    DistributedTransformerLayer layer(options_of(causal, "speed"));
    expect_has(error_of<UsageError>([&] {
                 layer->forward(Layer::Pair{torch::randn({1, kLength + 2, kHidden}), Tensor()});
               }),
               {"a sequence of 10 tokens is longer than causal_mask_size 8",
                "Set it to the longest sequence that there is"});
    expect_has(error_of<UsageError>([&] {
                 layer->forward(Layer::Four{x, x, {}, {}});
               }),
               {"DistributedTransformerLayer: its input is (hidden states, attention mask)",
                "got four tensors without it"});
    DistributedTransformerLayer with_cross(options_of(cross, "speed"));
    expect_has(error_of<UsageError>([&] {
                 with_cross->forward(Layer::Pair{x, {}});
               }),
               {"got two tensors with it"});
    expect_has(
        error_of<UsageError>([&] { layer->attention->forward(std::make_tuple(x, x, Tensor())); }),
        {"without cross_attention its input is (hidden states, mask); got three tensors"});
    expect_has(error_of<UsageError>(
                   [&] { with_cross->cross_attention->forward(std::make_tuple(x, Tensor())); }),
               {"with cross_attention its input is (hidden states, cross states, mask); got two "
                "tensors"});
    expect_has(error_of<UsageError>([&] {
                 DistributedTransformerLayer(options_of(Case(), "memory"))
                     ->forward(Layer::Pair{torch::randn({1, 7, kHidden}), {}});
               }),
               {"[1, 7, 16] along dimension 1 over 2 ranks"});
  });
}

}  // namespace
}  // namespace smp::nn::testing
