// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

/// Models whose layers are unlike each other, as plain libtorch modules. `layers()` lists them in
/// the order in which `forward` calls them, for splits by hand.
namespace bench {

using torch::Tensor;
namespace nn = torch::nn;

inline nn::Conv2d conv3(int64_t in, int64_t out, int64_t stride = 1) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false));
}

/// A model as the benchmark sees it.
struct Model : nn::Module {
  virtual Tensor loss(Tensor x, Tensor y) = 0;
  virtual Tensor inputs(int64_t batch) const = 0;
  virtual Tensor targets(int64_t batch) const = 0;
  std::vector<std::shared_ptr<nn::Module>> layers;

 protected:
  template <class M>
  M add(M module) {
    register_module("layer" + std::to_string(layers.size()), module);
    layers.push_back(module.ptr());
    return module;
  }
};

/// Embedding, feed-forward blocks and a head of 8,192 words, which costs as much as all blocks.
struct LargeVocabulary final : Model {
  static constexpr int64_t kWords = 8192, kWidth = 128, kBlocks = 8, kSequence = 32;

  LargeVocabulary() {
    embed = add(nn::Embedding(kWords, kWidth));
    for (int64_t i = 0; i < kBlocks; ++i) {
      blocks.push_back(add(nn::Sequential(nn::LayerNorm(nn::LayerNormOptions({kWidth})),
                                          nn::Linear(kWidth, 4 * kWidth), nn::GELU(),
                                          nn::Linear(4 * kWidth, kWidth))));
    }
    head = add(nn::Linear(kWidth, kWords));
  }

  Tensor loss(Tensor x, Tensor y) override {
    x = embed(x);
    for (auto& block : blocks) x = x + block->forward(x);
    return nn::functional::cross_entropy(head(x).flatten(0, 1), y.flatten());
  }
  Tensor inputs(int64_t batch) const override { return torch::randint(kWords, {batch, kSequence}); }
  Tensor targets(int64_t batch) const override {
    return torch::randint(kWords, {batch, kSequence});
  }

  nn::Embedding embed{nullptr};
  std::vector<nn::Sequential> blocks;
  nn::Linear head{nullptr};
};

struct ResidualImpl : nn::Module {
  ResidualImpl(int64_t in, int64_t out, int64_t stride)
      : conv1(register_module("conv1", conv3(in, out, stride))),
        norm1(register_module("norm1", nn::BatchNorm2d(out))),
        conv2(register_module("conv2", conv3(out, out))),
        norm2(register_module("norm2", nn::BatchNorm2d(out))) {
    if (stride == 1 && in == out) return;
    shortcut = register_module(
        "shortcut", nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)));
  }

  Tensor forward(Tensor x) {
    Tensor y = norm1(conv1(x));
    y = norm2(conv2(y.relu_()));
    return torch::relu(y + (shortcut.is_empty() ? x : shortcut(x)));
  }

  nn::Conv2d conv1;
  nn::BatchNorm2d norm1;
  nn::Conv2d conv2;
  nn::BatchNorm2d norm2;
  nn::Conv2d shortcut{nullptr};
};
TORCH_MODULE(Residual);

/// ResNet on 32 x 32 images: early layers have the work, late ones the parameters.
struct ResNet final : Model {
  ResNet() {
    stem = add(conv3(3, 16));
    int64_t in = 16;
    for (int64_t out : {16, 32, 64, 128}) {
      for (int i = 0; i < 2; ++i) {
        blocks.push_back(add(Residual(in, out, i == 0 && out > 16 ? 2 : 1)));
        in = out;
      }
    }
    head = add(nn::Linear(128, 10));
  }

  Tensor loss(Tensor x, Tensor y) override {
    x = torch::relu(stem(x));
    for (auto& block : blocks) x = block(x);
    return nn::functional::cross_entropy(head(x.mean({2, 3})), y);
  }
  Tensor inputs(int64_t batch) const override { return torch::randn({batch, 3, 32, 32}); }
  Tensor targets(int64_t batch) const override { return torch::randint(10, {batch}); }

  nn::Conv2d stem{nullptr};
  std::vector<Residual> blocks;
  nn::Linear head{nullptr};
};

/// U-Net on 64 x 64 images: the work is at both ends, and skips cross every cut.
struct UNet final : Model {
  UNet() {
    down = {add(twice(3, 8)), add(twice(8, 16)), add(twice(16, 32))};
    bottom = add(twice(32, 64));
    up = {add(twice(96, 32)), add(twice(48, 16)), add(twice(24, 8))};
    head = add(nn::Conv2d(8, 1, 1));
  }

  Tensor loss(Tensor x, Tensor y) override {
    std::vector<Tensor> skips;
    for (auto& block : down) {
      skips.push_back(block->forward(x));
      x = torch::max_pool2d(skips.back(), 2);
    }
    x = bottom->forward(x);
    for (auto& block : up) {
      x = block->forward(torch::cat(
          {torch::upsample_nearest2d(x, {2 * x.size(2), 2 * x.size(3)}), skips.back()}, 1));
      skips.pop_back();
    }
    return torch::binary_cross_entropy_with_logits(head(x), y);
  }
  Tensor inputs(int64_t batch) const override { return torch::randn({batch, 3, 64, 64}); }
  Tensor targets(int64_t batch) const override { return torch::rand({batch, 1, 64, 64}); }

  static nn::Sequential twice(int64_t in, int64_t out) {
    return nn::Sequential(conv3(in, out), nn::BatchNorm2d(out), nn::ReLU(), conv3(out, out),
                          nn::BatchNorm2d(out), nn::ReLU());
  }

  std::vector<nn::Sequential> down, up;
  nn::Sequential bottom{nullptr};
  nn::Conv2d head{nullptr};
};

}  // namespace bench
