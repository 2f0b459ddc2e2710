// SPDX-License-Identifier: Apache-2.0
// Attention of models that know nothing of it, computed as smp::TensorParallelismOptions say.

#include "nn/rewrite/attention_form.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "graph/visit.h"
#include "tests/nn/rewrite/harness.h"

namespace smp::nn::rewrite::testing {
namespace {

using torch::Tensor;

constexpr int64_t kFormBatch = 2, kFormLength = 5, kFormHeads = 4, kFormWidth = 16;
constexpr const char* kFused = "aten::scaled_dot_product_attention";

/// Two layers of attention, whose second is not like the first.
struct LayersImpl : torch::nn::Module {
  explicit LayersImpl(double dropout_ = 0) : dropout(dropout_) {
    torch::manual_seed(3);
    for (int i = 0; i < 2; ++i) {
      qkv.push_back(
          register_module(c10::str("qkv", i), torch::nn::Linear(kFormWidth, 3 * kFormWidth)));
      out.push_back(register_module(c10::str("out", i), torch::nn::Linear(kFormWidth, kFormWidth)));
    }
  }

  Tensor attention(int i, const Tensor& x, const Tensor& mask) {
    const auto parts =
        qkv[i](x).view({kFormBatch, kFormLength, 3, kFormHeads, -1}).permute({2, 0, 3, 1, 4});
    std::optional<Tensor> bias;
    if (i == 1) bias = mask;
    if (alibi_bias_max > 0) bias = linear_biases(x.options()) + (i == 0 ? later(x) : mask);
    const auto y = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], bias, dropout,
                                                       /*is_causal=*/i == 0 && !bias,
                                                       i == 0 ? std::optional<double>() : 0.7);
    return out[i](y.transpose(1, 2).flatten(2));
  }

  /// Computes the paper's formula: 2 ^ (-bias_max (h + 1) / heads) times the distance, negated.
  Tensor linear_biases(const torch::TensorOptions& options) const {
    const Tensor biases = torch::empty({1, kFormHeads, kFormLength, kFormLength}, torch::kDouble);
    for (int64_t h = 0; h < kFormHeads; ++h) {
      for (int64_t q = 0; q < kFormLength; ++q) {
        for (int64_t k = 0; k < kFormLength; ++k) {
          const double slope = std::pow(2, -alibi_bias_max * (h + 1.0) / kFormHeads);
          biases[0][h][q][k] = -slope * static_cast<double>(std::abs(q - k));
        }
      }
    }
    return biases.to(options);
  }

  static Tensor later(const Tensor& x) {
    return torch::full({kFormLength, kFormLength}, -INFINITY, x.options()).triu(1);
  }

  Tensor forward(Tensor x, const Tensor& mask) {
    for (int i = 0; i < 2; ++i) x = x + attention(i, x, mask);
    return x;
  }

  double dropout;
  double alibi_bias_max = 0;  ///< biases that the module adds itself; 0: none
  std::vector<torch::nn::Linear> qkv, out;
};
TORCH_MODULE(Layers);

Tensors states_and_mask(torch::Dtype type) {
  torch::manual_seed(4);
  return {torch::randn({kFormBatch, kFormLength, kFormWidth}).to(type),
          torch::randn({kFormBatch, 1, 1, kFormLength}).to(type)};
}

Function step_of(Layers& net) {
  return training([&net](const Tensors& in) -> Tensors {
    const auto result = net(in[0], in[1]);
    return {result.square().mean(), result};
  });
}

/// The options with both layers divided by heads.
DivideOptions options_of(const TensorTable& table, int ranks,
                         const TensorParallelismOptions& attention) {
  DivideOptions options = eager_options(table, ranks);
  for (const auto& entry : table.entries()) {
    const bool projects = entry.name.rfind("qkv", 0) == 0;
    if (!projects && entry.tensor.dim() < 2) continue;
    options.fixed[entry.name] = {entry.tensor.sizes().vec(), projects ? 0 : 1, projects ? 3 : 1,
                                 ranks};
    options.options_of[entry.name] = attention;
  }
  return options;
}

int64_t count_of(const Graph& graph, const std::string& name) {
  return std::count_if(graph.operators.begin(), graph.operators.end(),
                       [&](const auto& op) { return op.handle.operator_name().name == name; });
}

TEST(AttentionForm, IsTheFunctionOfTheModule) {
  for (const double dropout : {0.0, 0.3}) {
    for (const auto& attention : {TensorParallelismOptions().attention_in_fp32(true),
                                  TensorParallelismOptions().query_key_layer_scaling(true),
                                  TensorParallelismOptions().flash_attention(false)}) {
      Layers net(dropout);
      net->to(torch::kDouble);
      const TensorTable table = table_of(*net);
      const auto whole = capture(table, states_and_mask(torch::kDouble), step_of(net));
      for (const int ranks : {2, 4}) {
        const DividedGraph divided = divide(*whole, options_of(table, ranks, attention));
        const bool fused = dropout == 0 && attention.attention_in_fp32();
        EXPECT_EQ(count_of(divided.graph, kFused), fused ? 2 : 0);
        EXPECT_EQ(divided.computed_otherwise.size(), 2u);
        expect_equals_plain(divided, *net, table, states_and_mask(torch::kDouble), step_of(net),
                            ranks);
        expect_metas_hold(divided, table, states_and_mask(torch::kDouble), ranks);
      }
    }
  }
}

TEST(AttentionForm, AddsLinearBiases) {
  for (const double dropout : {0.0, 0.3}) {
    for (const int64_t bias_max : {8, 3}) {
      Layers net(dropout);
      net->to(torch::kDouble);
      const TensorTable table = table_of(*net);
      const auto whole = capture(table, states_and_mask(torch::kDouble), step_of(net));
      const auto alibi = TensorParallelismOptions().use_alibi(true).alibi_bias_max(bias_max);
      for (const int ranks : {2, 4}) {
        const DividedGraph divided = divide(*whole, options_of(table, ranks, alibi));
        EXPECT_EQ(divided.computed_otherwise.size(), 2u);
        EXPECT_EQ(count_of(divided.graph, "smp::tp_linear_biases"), 2);
        net->alibi_bias_max = static_cast<double>(bias_max);
        expect_equals_plain(divided, *net, table, states_and_mask(torch::kDouble), step_of(net),
                            ranks);
        net->alibi_bias_max = 0;
        expect_metas_hold(divided, table, states_and_mask(torch::kDouble), ranks);
      }
    }
  }
}

TEST(AttentionForm, ChecksWhereSlopesEnd) {
  Layers net;
  const TensorTable table = table_of(*net);
  const auto whole = capture(table, states_and_mask(torch::kFloat), step_of(net));
  const auto alibi = TensorParallelismOptions().use_alibi(true).alibi_bias_max(0);
  try {
    divide(*whole, options_of(table, 2, alibi));
    FAIL() << "slopes that end at 1 were taken";
  } catch (const UsageError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("alibi_bias_max must be 1 or more, got 0"), std::string::npos) << text;
  }
}

/// The factors that the operators of a graph multiply by.
std::vector<double> factors(const Graph& graph) {
  std::vector<double> result;
  for (const auto& op : graph.operators) {
    if (op.name() == "aten::mul.Scalar") result.push_back(op.arguments[1].constant.toDouble());
  }
  return result;
}

TEST(AttentionForm, ScalesTheSecondLayerByTwo) {
  Layers net;
  net->to(torch::kHalf);
  const TensorTable table = table_of(*net);
  const auto whole = capture(table, states_and_mask(torch::kHalf), step_of(net));
  const auto divided = divide(
      *whole, options_of(table, 2, TensorParallelismOptions().query_key_layer_scaling(true)));
  const double first = std::sqrt(0.5), second = std::sqrt(0.7);  // 4 channels; the scale given
  EXPECT_EQ(factors(divided.graph), (std::vector<double>{first, first, second / 2, second, 2}));
  // The first layer's number is 1: there is nothing to divide by, or to multiply in float32.
  for (const auto& op : divided.graph.operators) {
    if (op.name() != "aten::mul.Scalar" || op.arguments[1].constant.toDouble() != 2) continue;
    EXPECT_EQ(divided.graph.values[op.results[0]].meta.dtype, torch::kFloat);
  }
}

TEST(AttentionForm, InFloat32RoundsOnce) {
  Layers net;
  net->to(torch::kBFloat16);
  const TensorTable table = table_of(*net);
  const auto whole = capture(table, states_and_mask(torch::kBFloat16), step_of(net));
  for (const bool fused : {true, false}) {
    const auto divided = divide(
        *whole,
        options_of(table, 2,
                   TensorParallelismOptions().attention_in_fp32(true).flash_attention(fused)));
    int64_t attentions = 0;
    for (const auto& op : divided.graph.operators) {
      const std::string name = op.handle.operator_name().name;
      if (name != kFused && name != "aten::_safe_softmax") continue;
      ++attentions;
      graph::for_each_argument(op, [&](graph::ValueId id) {
        EXPECT_EQ(divided.graph.values[id].meta.dtype, torch::kFloat) << op.name();
      });
    }
    EXPECT_EQ(attentions, 2);
    EXPECT_EQ(count_of(divided.graph, kFused), fused ? 2 : 0);
    expect_metas_hold(divided, table, states_and_mask(torch::kBFloat16), 2);
  }
}

TEST(AttentionForm, IsSaidByTheParametersNextToTheQueries) {
  Layers net;
  const TensorTable table = table_of(*net);
  const auto whole = capture(table, states_and_mask(torch::kFloat), step_of(net));
  const auto forms = [&](const char* parameter) {
    std::vector<bool> said;
    const auto all =
        attention_forms(*whole, {{parameter, TensorParallelismOptions().attention_in_fp32(true)}});
    for (size_t i = 0; i < all.size(); ++i) {
      if (whole->operators[i].handle.operator_name().name == kFused) said.push_back(all[i].in_fp32);
    }
    return said;
  };
  EXPECT_EQ(forms("qkv0.bias"), (std::vector<bool>{true, false}));
  EXPECT_EQ(forms("qkv1.bias"), (std::vector<bool>{false, true}));
  EXPECT_EQ(forms("out0.weight"), (std::vector<bool>{false, false}));
  // All of a module are marked, so it does not matter which of its parameters is nearest.
  EXPECT_EQ(forms("qkv1.weight"), (std::vector<bool>{false, false}));
}

/// Three ranks cannot have parts of four heads.
TEST(AttentionForm, IsNotThatOfAttentionThatIsNotDivided) {
  Layers net;
  const TensorTable table = table_of(*net);
  const auto whole = capture(table, states_and_mask(torch::kFloat), step_of(net));
  DivideOptions options = eager_options(table, 3);
  for (const auto& entry : table.entries()) {
    options.options_of[entry.name] = TensorParallelismOptions().flash_attention(false);
  }
  const DividedGraph divided = divide(*whole, options);
  EXPECT_TRUE(divided.computed_otherwise.empty());
  EXPECT_EQ(count_of(divided.graph, kFused), 2);
}

}  // namespace
}  // namespace smp::nn::rewrite::testing
