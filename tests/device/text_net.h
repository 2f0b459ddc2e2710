#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

namespace smp::testing {

/// Embeddings of which one is the head too, dropout, a buffer that each microbatch writes, and a
/// value that skips over the middle.
struct TextNetImpl : torch::nn::Module {
  TextNetImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", torch::nn::Embedding(kLength, kWidth));
    drop = register_module("drop", torch::nn::Dropout(0.2));
    seen = register_buffer("seen", torch::zeros({1}));
    for (int i = 0; i < 4; ++i) {
      norms.push_back(register_module("norm" + std::to_string(i),
                                      torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}))));
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
  }

  torch::Tensor forward(torch::Tensor ids) {
    const auto places = torch::arange(ids.size(1), ids.options());
    const auto embedded = drop(tokens(ids) + positions(places));
    auto x = embedded;
    for (size_t i = 0; i < layers.size(); ++i) x = x + drop(torch::tanh(layers[i](norms[i](x))));
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
  std::vector<torch::nn::LayerNorm> norms;
  std::vector<torch::nn::Linear> layers;
  torch::Tensor seen;
};
TORCH_MODULE(TextNet);

}  // namespace smp::testing
