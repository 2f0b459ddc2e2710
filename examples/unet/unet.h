// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <cmath>

/// A small U-Net that predicts the noise in an image (Ho et al., arXiv 2006.11239), of plain
/// libtorch: residual blocks that know the time, attention in the middle, and skip connections from
/// each size down to the same one up.
namespace unet {

inline torch::nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel = 3, int64_t stride = 1) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2));
}

/// Times [batch], from 0 to 1, as waves of many lengths [batch, channels].
inline torch::Tensor waves(const torch::Tensor& times, int64_t channels) {
  const auto half = channels / 2;
  const auto lengths = torch::pow(1000.0, torch::arange(half, times.options()) / half);
  const auto angles = times.unsqueeze(1) * lengths;
  return torch::cat({angles.sin(), angles.cos()}, 1);
}

/// Two convolutions, with the time added between them, and the input beside them.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t in, int64_t out, int64_t time_channels) {
    norm1 = register_module("norm1", torch::nn::GroupNorm(4, in));
    first = register_module("first", conv(in, out));
    time = register_module("time", torch::nn::Linear(time_channels, out));
    norm2 = register_module("norm2", torch::nn::GroupNorm(4, out));
    second = register_module("second", conv(out, out));
    beside = register_module("beside", conv(in, out, 1));
  }
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& t) {
    auto y = first(torch::silu(norm1(x))) + time(t).unsqueeze(-1).unsqueeze(-1);
    return beside(x) + second(torch::silu(norm2(y)));
  }
  torch::nn::GroupNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Conv2d first{nullptr}, second{nullptr}, beside{nullptr};
  torch::nn::Linear time{nullptr};
};
TORCH_MODULE(Block);

/// Attention of all pixels to all, beside them.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(int64_t channels) {
    norm = register_module("norm", torch::nn::GroupNorm(4, channels));
    query_key_value = register_module("query_key_value", conv(channels, 3 * channels, 1));
    out = register_module("out", conv(channels, channels, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = query_key_value(norm(x)).flatten(2).transpose(1, 2).chunk(3, -1);
    const auto mixed = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
    return x + out(mixed.transpose(1, 2).reshape(x.sizes()));
  }
  torch::nn::GroupNorm norm{nullptr};
  torch::nn::Conv2d query_key_value{nullptr}, out{nullptr};
};
TORCH_MODULE(Attention);

/// Noisy images [batch, 1, side, side] and times [batch] to the noise in them. The side is a
/// multiple of 4.
struct UNetImpl : torch::nn::Module {
  explicit UNetImpl(int64_t width = 16) : time_channels(4 * width) {
    const auto block = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, Block(in, out, time_channels));
    };
    time1 = register_module("time1", torch::nn::Linear(time_channels, time_channels));
    time2 = register_module("time2", torch::nn::Linear(time_channels, time_channels));
    enter = register_module("enter", conv(1, width));
    down1 = block("down1", width, width);
    shrink1 = register_module("shrink1", conv(width, 2 * width, 3, 2));
    down2 = block("down2", 2 * width, 2 * width);
    shrink2 = register_module("shrink2", conv(2 * width, 4 * width, 3, 2));
    middle1 = block("middle1", 4 * width, 4 * width);
    attention = register_module("attention", Attention(4 * width));
    middle2 = block("middle2", 4 * width, 4 * width);
    up2 = block("up2", 6 * width, 2 * width);
    up1 = block("up1", 3 * width, width);
    norm = register_module("norm", torch::nn::GroupNorm(4, width));
    leave = register_module("leave", conv(width, 1));
  }
  torch::Tensor forward(const torch::Tensor& images, const torch::Tensor& times) {
    const auto t = torch::silu(time2(torch::silu(time1(waves(times, time_channels)))));
    const auto full = down1(enter(images), t);
    const auto half = down2(shrink1(full), t);
    auto x = middle2(attention(middle1(shrink2(half), t)), t);
    x = up2(torch::cat({torch::upsample_nearest2d(x, half.sizes().slice(2)), half}, 1), t);
    x = up1(torch::cat({torch::upsample_nearest2d(x, full.sizes().slice(2)), full}, 1), t);
    return leave(torch::silu(norm(x)));
  }
  int64_t time_channels;
  torch::nn::Linear time1{nullptr}, time2{nullptr};
  torch::nn::Conv2d enter{nullptr}, shrink1{nullptr}, shrink2{nullptr}, leave{nullptr};
  Block down1{nullptr}, down2{nullptr}, middle1{nullptr}, middle2{nullptr}, up2{nullptr},
      up1{nullptr};
  Attention attention{nullptr};
  torch::nn::GroupNorm norm{nullptr};
};
TORCH_MODULE(UNet);

}  // namespace unet
