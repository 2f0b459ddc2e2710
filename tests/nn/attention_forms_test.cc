// SPDX-License-Identifier: Apache-2.0
// The ways in which an attention layer computes one function: in float32, with scores divided by
// the number of the layer, and one operator after the other.

#include <ATen/record_function.h>

#include <cmath>

#include "graph/keyed_random.h"
#include "smp/nn.h"
#include "tests/nn/transformer_cases.h"

namespace smp::nn::testing {
namespace {

using Options = DistributedAttentionLayerOptions;

Options options_of(const Case& test) {
  return Options()
      .num_attention_heads(kHeads)
      .attention_head_size(kChannels)
      .hidden_size(kHidden)
      .attention_dropout_prob(test.attention_dropout)
      .hidden_dropout_prob(test.dropout)
      .causal_mask_size(test.causal ? std::optional(kLength) : std::nullopt)
      .use_alibi(test.alibi);
}

struct Form {
  const char* name;
  std::function<Options(Options)> set;
};

std::vector<Form> forms() {
  return {{"in float32", [](Options options) { return options.attention_in_fp32(true); }},
          {"scaled by the layer",
           [](Options options) { return options.query_key_layer_scaling(true).layer_idx(4); }},
          {"in steps", [](Options options) { return options.flash_attention(false); }}};
}

/// The result, and the gradients of states and mask.
Tensors backward_of(const Tensor& result, const Tensor& of_result, const Tensor& hidden,
                    const Tensor& mask) {
  result.backward(of_result);
  return {result.detach(), hidden.grad(), mask.grad()};
}

TEST(AttentionForms, AreThatOfPlainLibtorch) {
  Case masked, alibi, dropout;
  masked.causal = alibi.alibi = dropout.causal = true;
  dropout.attention_dropout = dropout.dropout = 0.2;
  for (const Case& test : {masked, alibi, dropout}) {
    for (const Form& form : forms()) {
      for (const int ranks : {1, 2}) {
        torch::manual_seed(1);
        const auto x = torch::randn({kBatch, kLength, kHidden}, torch::kDouble);
        const auto bias = torch::randn({kBatch, 1, 1, kLength}, torch::kDouble);
        const auto of_result = torch::randn_like(x);
        const Outcome outcome = run_module<DistributedAttentionLayer>(
            ranks, [&] { return DistributedAttentionLayer(form.set(options_of(test))); },
            [&](DistributedAttentionLayer& layer) {
              const Tensor hidden = x.clone().requires_grad_();
              const Tensor mask = bias.clone().requires_grad_();
              return backward_of(layer->forward(std::make_tuple(hidden, mask)), of_result, hidden,
                                 mask);
            });
        Named with_prefix;
        for (const auto& [name, tensor] : outcome.parameters) with_prefix["a." + name] = tensor;
        Named parameters = leaves(with_prefix);
        const Tensor hidden = x.clone().requires_grad_(), mask = bias.clone().requires_grad_();
        const graph::KeyedRandomScope random({3, 0, 1, 2});
        const Tensors expected = backward_of(
            plain_of(test, parameters).attention(hidden, {}, mask, "a"), of_result, hidden, mask);
        Named gradients;
        for (const auto& [name, gradient] : gradients_of(parameters)) {
          gradients[name.substr(2)] = gradient;
        }
        expect_close(outcome, expected, gradients, c10::str(form.name, " on ", ranks, " ranks"));
      }
    }
  }
}

/// A layer in evaluation whose residual is not normalised away, and its inputs.
struct Sample {
  Sample(const Options& options, torch::Dtype type) {
    torch::manual_seed(5);
    layer = DistributedAttentionLayer(options);
    layer->to(type);
    layer->eval();
    x = torch::randn({2, 5, kHidden}).to(type);
  }

  /// The layer's result, given the attention of queries, keys and values [N, heads, S, channels].
  Tensor result(const std::function<Tensor(Tensor, Tensor, Tensor)>& attend) {
    const auto parts = layer->query_key_value(x)
                           .view({2, 5, 3, kHeads, kChannels})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const auto context = attend(parts[0], parts[1], parts[2]).transpose(1, 2).flatten(2);
    return layer->layernorm(x + layer->dense(context));
  }

  DistributedAttentionLayer layer{nullptr};
  Tensor x;
};

Tensor in_float32(const Tensor& q, const Tensor& k, const Tensor& v) {
  const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  const double scale = 1 / std::sqrt(static_cast<double>(kChannels));
  const auto scores = torch::matmul(q.to(torch::kFloat) * scale, k.to(torch::kFloat).mT());
  const auto context = torch::matmul(scores.softmax(-1), v.to(torch::kFloat));
  at::autocast::set_autocast_enabled(at::kCPU, autocast);
  return context.to(q.scalar_type());
}

TEST(AttentionForms, InFloat32RoundHalfPrecisionOnce) {
  on_ranks(1, [](int) {
    const torch::NoGradGuard no_grad;
    const auto in_steps = options_of(Case()).flash_attention(false);
    for (const bool autocast : {false, true}) {
      const auto type = autocast ? torch::kFloat : torch::kBFloat16;
      Sample half(in_steps, type);
      auto wide_options = in_steps;
      Sample wide(wide_options.attention_in_fp32(true), type);
      std::optional<Autocast> scope;
      if (autocast) scope.emplace();
      const auto got = wide.layer->forward(std::make_tuple(wide.x, Tensor()));
      expect_equal(got, wide.result(in_float32), "in float32");
      EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), autocast);
      const auto rounded = half.layer->forward(std::make_tuple(half.x, Tensor()));
      EXPECT_FALSE(torch::equal(rounded, got)) << "in bfloat16 all along";
    }
  });
}

/// Products beyond 65504, the largest number of float16.
TEST(AttentionForms, ScaledByTheLayerDoNotOverflow) {
  on_ranks(1, [](int) {
    const torch::NoGradGuard no_grad;
    const auto options = Options()
                             .num_attention_heads(1)
                             .attention_head_size(8)
                             .hidden_size(8)
                             .attention_dropout_prob(0)
                             .hidden_dropout_prob(0)
                             .flash_attention(false);
    torch::manual_seed(2);
    const auto x = (torch::randn({1, 4, 8}) * 250).to(torch::kHalf);
    const auto result = [&](const Options& form, torch::Dtype type) {
      DistributedAttentionLayer layer(form);
      layer->query_key_value->weight.copy_(torch::eye(8).repeat({3, 1}));
      layer->query_key_value->bias.zero_();
      layer->dense->weight.copy_(torch::eye(8));
      layer->dense->bias.zero_();
      layer->to(type);
      return layer->forward(std::make_tuple(x.to(type), Tensor())).to(torch::kDouble);
    };
    auto scaled = options;
    scaled.query_key_layer_scaling(true).layer_idx(15);
    EXPECT_TRUE(result(options, torch::kHalf).isnan().any().item<bool>());
    expect_close(result(scaled, torch::kHalf), result(options, torch::kDouble), "scaled", 0.01);
  });
}

/// Whether `run` calls an operator.
bool calls(const char* name, const std::function<void()>& run) {
  static thread_local bool found;
  static thread_local const char* wanted;
  found = false;
  wanted = name;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        found = found || std::string(function.name()) == wanted;
        return nullptr;
      }));
  run();
  at::removeCallback(handle);
  return found;
}

TEST(AttentionForms, AreFusedWhereTheOptionsAllow) {
  on_ranks(1, [](int) {
    const auto fused = [](const Options& options) {
      Sample sample(options, torch::kFloat);
      return calls("aten::scaled_dot_product_attention",
                   [&] { sample.layer->forward(std::make_tuple(sample.x, Tensor())); });
    };
    EXPECT_TRUE(fused(options_of(Case())));
    for (const Form& form : forms()) {
      EXPECT_EQ(fused(form.set(options_of(Case()))), std::string(form.name) == "in float32");
    }
  });
}

TEST(AttentionForms, AreThoseOfTheLayersOfATransformer) {
  on_ranks(1, [](int) {
    DistributedTransformer model(DistributedTransformerOptions()
                                     .num_layers(2)
                                     .num_attention_heads(kHeads)
                                     .hidden_size(kHidden)
                                     .attention_in_fp32(true)
                                     .query_key_layer_scaling(true)
                                     .flash_attention(false));
    for (int64_t i = 0; i < 2; ++i) {
      const auto& options =
          model->seq_layers[i]->as<DistributedTransformerLayer>()->attention->options;
      EXPECT_TRUE(options.attention_in_fp32());
      EXPECT_TRUE(options.query_key_layer_scaling());
      EXPECT_FALSE(options.flash_attention());
      EXPECT_EQ(options.layer_idx(), i);
    }
  });
}

TEST(AttentionForms, RefuseALayerWithoutANumber) {
  on_ranks(1, [](int) {
    for (const auto number : {std::optional<int64_t>(), std::optional<int64_t>(-1)}) {
      expect_has(
          error_of<UsageError>([&] {
            DistributedAttentionLayer(Options().query_key_layer_scaling(true).layer_idx(number));
          }),
          {"DistributedAttentionLayer: query_key_layer_scaling needs layer_idx, the number "
           "of the layer from 0. Set it"});
    }
  });
}

}  // namespace
}  // namespace smp::nn::testing
