// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include "examples/huggingface/models.h"
#include "examples/llama/llama.h"

/// Decoders whose attention and feed-forward layer stand side by side, of plain libtorch.
namespace huggingface {

/// A block of GPT-NeoX (`kNeoX`: a norm for each branch, queries, keys and values of a head one
/// after the other) or of GPT-J (one norm, no bias in attention).
enum class Kind { kNeoX, kGPTJ };

/// The first channels turned by positions, in neighbouring pairs (GPT-J) or in halves.
inline torch::Tensor rotated(const torch::Tensor& x, int64_t channels, Kind kind) {
  constexpr double kTheta = 10000;
  auto turned = x.narrow(-1, 0, channels);
  if (kind == Kind::kGPTJ) {
    // Pairs become halves and, turned, pairs again.
    turned = llama::rotated(turned.unflatten(-1, {-1, 2}).transpose(-1, -2).flatten(-2), kTheta);
    turned = turned.unflatten(-1, {2, -1}).transpose(-1, -2).flatten(-2);
  } else {
    turned = llama::rotated(turned, kTheta);
  }
  return torch::cat({turned, x.narrow(-1, channels, x.size(-1) - channels)}, -1);
}

template <Kind kind>
struct ParallelBlockImpl : torch::nn::Module {
  explicit ParallelBlockImpl(const Shape& shape_) : shape(shape_) {
    const auto linear = [&](const char* name, int64_t in, int64_t out, bool bias) {
      return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias)));
    };
    constexpr bool kBias = kind == Kind::kNeoX;
    norm1 = register_module(kBias ? "norm1" : "norm", make_norm(shape));
    if (kBias) norm2 = register_module("norm2", make_norm(shape));
    query_key_value = linear("query_key_value", shape.width(), 3 * shape.width(), kBias);
    out = linear("out", shape.width(), shape.width(), kBias);
    expand = linear("expand", shape.width(), shape.inner(), true);
    contract = linear("contract", shape.inner(), shape.width(), true);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto normed = norm1(x);
    const auto inner = expand(norm2 ? norm2(x) : normed);
    return x + attention(normed) + contract(activated(inner, shape.activation()));
  }
  torch::Tensor attention(const torch::Tensor& x) {
    const auto batch = x.size(0), length = x.size(1);
    const auto heads = shape.heads(), channels = shape.width() / heads;
    const auto all = query_key_value(x);
    const auto parts = kind == Kind::kNeoX
                           ? all.view({batch, length, heads, 3, channels}).permute({3, 0, 2, 1, 4})
                           : all.view({batch, length, 3, heads, channels}).permute({2, 0, 3, 1, 4});
    const auto mixed = torch::scaled_dot_product_attention(
        rotated(parts[0], shape.rotary(), kind), rotated(parts[1], shape.rotary(), kind), parts[2],
        /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true);
    return out(mixed.transpose(1, 2).flatten(2));
  }
  Shape shape;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear query_key_value{nullptr}, out{nullptr}, expand{nullptr}, contract{nullptr};
};

/// GPTNeoXForCausalLM and GPTJForCausalLM: token ids, [batch, length], to logits of the next one.
template <Kind kind>
struct ParallelDecoderImpl : torch::nn::Module {
  explicit ParallelDecoderImpl(const Shape& shape) {
    tokens = register_module("tokens", torch::nn::Embedding(shape.vocabulary(), shape.width()));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < shape.layers(); ++i) {
      blocks->push_back(std::make_shared<ParallelBlockImpl<kind>>(shape));
    }
    norm = register_module("norm", make_norm(shape));
    head = register_module(
        "head",
        torch::nn::Linear(
            torch::nn::LinearOptions(shape.width(), shape.vocabulary()).bias(kind == Kind::kGPTJ)));
  }
  torch::Tensor forward(const torch::Tensor& ids) {
    auto x = tokens(ids);
    for (const auto& block : *blocks) x = block->as<ParallelBlockImpl<kind>>()->forward(x);
    return head(norm(x));
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};

using GPTNeoXImpl = ParallelDecoderImpl<Kind::kNeoX>;
TORCH_MODULE(GPTNeoX);
using GPTJImpl = ParallelDecoderImpl<Kind::kGPTJ>;
TORCH_MODULE(GPTJ);

}  // namespace huggingface
