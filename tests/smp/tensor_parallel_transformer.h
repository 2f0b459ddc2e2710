// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

/// Transformers of plain libtorch that know nothing of tensor parallelism.
namespace smp::testing {

/// A block that normalises before attention and before the feed-forward layers. Dropout applies to
/// the probabilities of attention, too.
struct TransformerBlock : torch::nn::Module {
  TransformerBlock(int64_t width, int64_t heads, double dropout, bool causal)
      : heads(heads), dropout(dropout), causal(causal) {
    const auto layer = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, torch::nn::Linear(in, out));
    };
    const auto norm = [&](const char* name) {
      return register_module(name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    };
    before_attention = norm("before_attention");
    qkv = layer("qkv", width, 3 * width);
    projection = layer("projection", width, width);
    before_output = norm("before_output");
    up = layer("up", width, 4 * width);
    down = layer("down", 4 * width, width);
    drop = register_module("drop", torch::nn::Dropout(dropout));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = x + drop(projection(attend(qkv(before_attention(x)))));
    return x + drop(down(torch::gelu(up(before_output(x)))));
  }

  torch::Tensor attend(const torch::Tensor& x) {
    const int64_t samples = x.size(0), length = x.size(1), width = x.size(2) / 3;
    const auto parts = x.view({samples, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const auto y = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {},
                                                       is_training() ? dropout : 0.0, causal);
    return y.transpose(1, 2).reshape({samples, length, width});
  }

  int64_t heads;
  double dropout;
  bool causal;
  torch::nn::LayerNorm before_attention{nullptr}, before_output{nullptr};
  torch::nn::Linear qkv{nullptr}, projection{nullptr}, up{nullptr}, down{nullptr};
  torch::nn::Dropout drop{nullptr};
};

struct DecoderSizes {
  int64_t layers = 2, samples = 2, length = 8, width = 16, heads = 4, vocabulary = 32;
};

/// A GPT without dropout; microbatches are of `samples` samples.
struct Decoder : torch::nn::Module {
  explicit Decoder(const DecoderSizes& sizes) {
    tokens = register_module("tokens", torch::nn::Embedding(sizes.vocabulary, sizes.width));
    positions = register_parameter("positions", torch::randn({sizes.length, sizes.width}));
    for (int64_t i = 0; i < sizes.layers; ++i) {
      blocks.push_back(register_module(
          "block" + std::to_string(i),
          std::make_shared<TransformerBlock>(sizes.width, sizes.heads, 0.0, /*causal=*/true)));
    }
    last =
        register_module("last", torch::nn::LayerNorm(torch::nn::LayerNormOptions({sizes.width})));
    head = register_module(
        "head",
        torch::nn::Linear(torch::nn::LinearOptions(sizes.width, sizes.vocabulary).bias(false)));
  }

  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    auto x = tokens(ids) + positions;
    for (const auto& block : blocks) x = block->forward(x);
    return torch::nn::functional::cross_entropy(head(last(x)).flatten(0, 1), targets.flatten());
  }

  torch::nn::Embedding tokens{nullptr};
  torch::Tensor positions;
  std::vector<std::shared_ptr<TransformerBlock>> blocks;
  torch::nn::LayerNorm last{nullptr};
  torch::nn::Linear head{nullptr};
};

}  // namespace smp::testing
