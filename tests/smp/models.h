// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <vector>

namespace smp::testing {

/// A small GPT with dropout; tied or not.
struct TinyGptImpl : torch::nn::Module {
  explicit TinyGptImpl(bool tied, int layers = 3, double dropout = 0.1) {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", torch::nn::Embedding(kLength, kWidth));
    drop = register_module("drop", torch::nn::Dropout(dropout));
    for (int i = 0; i < layers; ++i) {
      attention_in.push_back(register_module("attention_in" + std::to_string(i),
                                             torch::nn::Linear(kWidth, 3 * kWidth)));
      attention_out.push_back(
          register_module("attention_out" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
      norm.push_back(register_module("norm" + std::to_string(i),
                                     torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}))));
      up.push_back(
          register_module("up" + std::to_string(i), torch::nn::Linear(kWidth, 2 * kWidth)));
      down.push_back(
          register_module("down" + std::to_string(i), torch::nn::Linear(2 * kWidth, kWidth)));
    }
    if (tied) {
      // One tensor under two names.
      head = register_parameter("head", tokens->weight);
    } else {
      head = register_parameter("head", torch::randn({kVocabulary, kWidth}) * 0.1);
    }
  }

  torch::Tensor forward(torch::Tensor ids) {
    const auto length = ids.size(1);
    auto x = tokens(ids) + positions(torch::arange(length));
    x = drop(x);
    for (size_t i = 0; i < up.size(); ++i) {
      auto qkv = attention_in[i](norm[i](x)).view({ids.size(0), length, 3, 2, kWidth / 2});
      qkv = qkv.permute({2, 0, 3, 1, 4});
      auto y = torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, true);
      x = x + drop(attention_out[i](y.transpose(1, 2).reshape({ids.size(0), length, kWidth})));
      x = x + drop(down[i](torch::gelu(up[i](x))));
    }
    return torch::nn::functional::linear(x, head);
  }

  static torch::Tensor criterion(torch::Tensor scores, torch::Tensor targets) {
    return torch::nn::functional::cross_entropy(scores.flatten(0, 1), targets.flatten());
  }
  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    return criterion(forward(ids), targets);
  }

  static std::vector<torch::Tensor> batch(int64_t size) {
    return {torch::randint(kVocabulary, {size, kLength}),
            torch::randint(kVocabulary, {size, kLength})};
  }

  static constexpr int64_t kVocabulary = 17, kWidth = 16, kLength = 8;
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::Dropout drop{nullptr};
  std::vector<torch::nn::Linear> attention_in, attention_out, up, down;
  std::vector<torch::nn::LayerNorm> norm;
  torch::Tensor head;
};
TORCH_MODULE(TinyGpt);

struct TiedGpt : TinyGptImpl {
  TiedGpt() : TinyGptImpl(/*tied=*/true) {}
};

struct UntiedGpt : TinyGptImpl {
  UntiedGpt() : TinyGptImpl(/*tied=*/false) {}
};

/// A convolutional network with BatchNorm, in-place ReLU, a skip connection and dropout.
struct TinyConvNetImpl : torch::nn::Module {
  TinyConvNetImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)));
    norm1 = register_module("norm1", torch::nn::BatchNorm2d(4));
    conv2 =
        register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).padding(1)));
    norm2 = register_module("norm2", torch::nn::BatchNorm2d(4));
    fc1 = register_module("fc1", torch::nn::Linear(4 * 9, 12));
    fc2 = register_module("fc2", torch::nn::Linear(12, 5));
    drop = register_module("drop", torch::nn::Dropout(0.25));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = norm1(conv1(x)).relu_();
    x = norm2(conv2(x)).relu_() + x;
    x = torch::max_pool2d(x, 2).flatten(1);
    x = drop(torch::relu(fc1(x)));
    return torch::log_softmax(fc2(x), 1);
  }

  static torch::Tensor criterion(torch::Tensor scores, torch::Tensor y) {
    return torch::nll_loss(scores, y);
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) { return criterion(forward(x), y); }

  static std::vector<torch::Tensor> batch(int64_t size) {
    return {torch::randn({size, 1, 8, 8}), torch::randint(5, {size})};
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(TinyConvNet);

}  // namespace smp::testing
