// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>

/// Llama, of plain libtorch: RMSNorm, rotary positions, queries in groups that share keys and
/// values, SwiGLU. It knows nothing of `smp`. examples/huggingface/llama.json names its parameters
/// as LlamaForCausalLM of Hugging Face's library does.
namespace llama {

/// Shape of a `Llama`.
struct LlamaOptions {
  TORCH_ARG(int64_t, vocabulary) = 64;
  TORCH_ARG(int64_t, layers) = 4;
  TORCH_ARG(int64_t, width) = 64;
  TORCH_ARG(int64_t, heads) = 4;
  TORCH_ARG(int64_t, key_value_heads) = 2;
  TORCH_ARG(int64_t, inner) = 176;
  TORCH_ARG(double, theta) = 10000;
  TORCH_ARG(double, epsilon) = 1e-6;
  TORCH_ARG(bool, tied) = false;  ///< the head's weight is that of the tokens
};

/// A linear layer without bias that can be adapted.
struct LinearImpl : torch::nn::Module {
  LinearImpl(int64_t in, int64_t out) {
    weight = register_parameter("weight", torch::randn({out, in}) / std::sqrt(in));
  }
  /// LoRA (Hu et al., arXiv 2106.09685): keeps the weight and learns a term added to it, a product
  /// of two matrices of this rank, which begins at zero.
  void adapt(int64_t rank) {
    const auto in = weight.size(1);
    low_in = register_parameter("low_in", torch::randn({rank, in}) / std::sqrt(in));
    low_out = register_parameter("low_out", torch::zeros({weight.size(0), rank}));
  }
  /// Adds the learnt term to the weight.
  void merge() {
    const torch::NoGradGuard no_grad;
    weight += low_out.mm(low_in);
    low_out.zero_();
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = torch::linear(x, weight);
    return low_in.defined() ? y + torch::linear(torch::linear(x, low_in), low_out) : y;
  }
  torch::Tensor weight, low_in, low_out;
};
TORCH_MODULE(Linear);

struct RMSNormImpl : torch::nn::Module {
  explicit RMSNormImpl(const LlamaOptions& options) : epsilon(options.epsilon()) {
    weight = register_parameter("weight", torch::ones({options.width()}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::rms_norm(x, weight.sizes(), weight, epsilon);
  }
  double epsilon;
  torch::Tensor weight;
};
TORCH_MODULE(RMSNorm);

/// The channels of [batch, heads, length, channels], turned pairwise (a channel of the first half
/// with one of the second) by angles in proportion to the position (Su et al., arXiv 2104.09864).
inline torch::Tensor rotated(const torch::Tensor& x, double theta) {
  const auto half = static_cast<double>(x.size(-1) / 2);
  const auto angles = torch::outer(torch::arange(x.size(2), x.options()),
                                   torch::pow(theta, torch::arange(half, x.options()) / -half));
  const auto cos = angles.cos(), sin = angles.sin();
  const auto parts = x.chunk(2, -1);
  return torch::cat({parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin}, -1);
}

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const LlamaOptions& options_) : options(options_) {
    const auto shared = options.width() / options.heads() * options.key_value_heads();
    query = register_module("query", Linear(options.width(), options.width()));
    key = register_module("key", Linear(options.width(), shared));
    value = register_module("value", Linear(options.width(), shared));
    out = register_module("out", Linear(options.width(), options.width()));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto heads_of = [&](Linear& layer, int64_t heads) {
      return layer(x).view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
    };
    const auto mixed = torch::scaled_dot_product_attention(
        rotated(heads_of(query, options.heads()), options.theta()),
        rotated(heads_of(key, options.key_value_heads()), options.theta()),
        heads_of(value, options.key_value_heads()), /*attn_mask=*/{}, /*dropout_p=*/0,
        /*is_causal=*/true, /*scale=*/std::nullopt, /*enable_gqa=*/true);
    return out(mixed.transpose(1, 2).flatten(2));
  }
  LlamaOptions options;
  Linear query{nullptr}, key{nullptr}, value{nullptr}, out{nullptr};
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const LlamaOptions& options) {
    norm1 = register_module("norm1", RMSNorm(options));
    attention = register_module("attention", Attention(options));
    norm2 = register_module("norm2", RMSNorm(options));
    gate = register_module("gate", Linear(options.width(), options.inner()));
    up = register_module("up", Linear(options.width(), options.inner()));
    down = register_module("down", Linear(options.inner(), options.width()));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x + attention(norm1(x));
    const auto y = norm2(x);
    return x + down(torch::silu(gate(y)) * up(y));
  }
  RMSNorm norm1{nullptr}, norm2{nullptr};
  Attention attention{nullptr};
  Linear gate{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

/// Tokens [batch, length] to logits of the next one.
struct LlamaImpl : torch::nn::Module {
  explicit LlamaImpl(const LlamaOptions& options) {
    tokens = register_module("tokens", torch::nn::Embedding(options.vocabulary(), options.width()));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < options.layers(); ++i) blocks->push_back(Block(options));
    norm = register_module("norm", RMSNorm(options));
    if (!options.tied()) {
      head = register_module("head", Linear(options.width(), options.vocabulary()));
    }
  }
  torch::Tensor forward(const torch::Tensor& ids) {
    auto x = tokens(ids);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::linear(norm(x), head ? head->weight : tokens->weight);
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  RMSNorm norm{nullptr};
  Linear head{nullptr};
};
TORCH_MODULE(Llama);

}  // namespace llama
