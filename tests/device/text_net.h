// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

namespace smp::testing {

/// Norm, layer and dropout around a skip connection.
struct TextBlockImpl : torch::nn::Module {
  explicit TextBlockImpl(int64_t width) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    layer = register_module("layer", torch::nn::Linear(width, width));
    drop = register_module("drop", torch::nn::Dropout(0.2));
  }

  torch::Tensor forward(torch::Tensor x) { return x + drop(torch::tanh(layer(norm(x)))); }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear layer{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(TextBlock);

/// Embeddings of which one is the head too, dropout, a buffer that each microbatch writes, and a
/// value that skips over the middle.
struct TextNetImpl : torch::nn::Module {
  TextNetImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", torch::nn::Embedding(kLength, kWidth));
    drop = register_module("drop", torch::nn::Dropout(0.2));
    seen = register_buffer("seen", torch::zeros({1}));
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), TextBlock(kWidth)));
    }
  }

  torch::Tensor forward(torch::Tensor ids) {
    const auto places = torch::arange(ids.size(1), ids.options());
    const auto embedded = drop(tokens(ids) + positions(places));
    auto x = embedded;
    for (TextBlock& block : blocks) x = block(x);
    if (is_training()) seen += 1;
    return torch::nn::functional::linear((x + embedded).transpose(0, 1) * 0.5, tokens->weight)
        .transpose(0, 1);
  }

  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    return torch::nn::functional::cross_entropy(forward(ids).flatten(0, 1), targets.flatten());
  }

  static constexpr int64_t kVocabulary = 13, kWidth = 8, kLength = 5;
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::Dropout drop{nullptr};
  std::vector<TextBlock> blocks;
  torch::Tensor seen;
};
TORCH_MODULE(TextNet);

}  // namespace smp::testing
