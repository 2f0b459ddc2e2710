// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <optional>
#include <utility>
#include <vector>

/// Models for images and signals, written in plain libtorch without any knowledge of smp.
namespace stranger {

/// Convolution and BatchNorm, "same" padding.
inline torch::nn::Sequential conv_norm(int64_t in, int64_t out, int64_t kernel,
                                       int64_t stride = 1) {
  return torch::nn::Sequential(
      torch::nn::Conv2d(
          torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false)),
      torch::nn::BatchNorm2d(out));
}

/// He et al. 2015: 1x1, 3x3, 1x1 with in-place ReLU and an in-place sum.
struct BottleneckImpl : torch::nn::Module {
  BottleneckImpl(int64_t in, int64_t width, int64_t stride) {
    const int64_t out = 2 * width;
    conv1 = register_module("conv1", conv_norm(in, width, 1));
    conv2 = register_module("conv2", conv_norm(width, width, 3, stride));
    conv3 = register_module("conv3", conv_norm(width, out, 1));
    relu = register_module("relu", torch::nn::ReLU(torch::nn::ReLUOptions(true)));
    if (stride != 1 || in != out) {
      downsample = register_module("downsample", conv_norm(in, out, 1, stride));
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    auto out = relu(conv1->forward(x));
    out = relu(conv2->forward(out));
    out = conv3->forward(out);
    out += downsample.is_empty() ? x : downsample->forward(x);
    return relu(out);
  }

  torch::nn::Sequential conv1{nullptr}, conv2{nullptr}, conv3{nullptr}, downsample{nullptr};
  torch::nn::ReLU relu{nullptr};
};
TORCH_MODULE(Bottleneck);

struct ResNetImpl : torch::nn::Module {
  explicit ResNetImpl(int64_t classes) {
    stem = register_module("stem", conv_norm(3, 8, 3));
    layer1 =
        register_module("layer1", torch::nn::Sequential(Bottleneck(8, 4, 1), Bottleneck(8, 4, 1)));
    layer2 =
        register_module("layer2", torch::nn::Sequential(Bottleneck(8, 8, 2), Bottleneck(16, 8, 1)));
    fc = register_module("fc", torch::nn::Linear(16, classes));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = stem->forward(x).relu_();
    x = torch::max_pool2d(x, 2);
    x = layer2->forward(layer1->forward(x));
    x = torch::adaptive_avg_pool2d(x, {1, 1});
    return fc(x.view({x.size(0), -1}));
  }

  torch::nn::Sequential stem{nullptr}, layer1{nullptr}, layer2{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(ResNet);

/// Huang et al. 2016: each layer reads the concatenation of all before it.
struct DenseLayerImpl : torch::nn::Module {
  DenseLayerImpl(int64_t in, int64_t growth) {
    norm1 = register_module("norm1", torch::nn::BatchNorm2d(in));
    conv1 = register_module(
        "conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(in, 2 * growth, 1).bias(false)));
    norm2 = register_module("norm2", torch::nn::BatchNorm2d(2 * growth));
    conv2 = register_module(
        "conv2",
        torch::nn::Conv2d(torch::nn::Conv2dOptions(2 * growth, growth, 3).padding(1).bias(false)));
  }

  torch::Tensor forward(const std::vector<torch::Tensor>& features) {
    auto x = conv1(torch::relu(norm1(torch::cat(features, 1))));
    x = conv2(torch::relu(norm2(x)));
    return torch::dropout(x, 0.2, is_training());
  }

  torch::nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
};
TORCH_MODULE(DenseLayer);

struct DenseBlockImpl : torch::nn::Module {
  DenseBlockImpl(int layers, int64_t in, int64_t growth) {
    for (int i = 0; i < layers; ++i) {
      this->layers.push_back(
          register_module("layer" + std::to_string(i), DenseLayer(in + i * growth, growth)));
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    std::vector<torch::Tensor> features{x};
    for (auto& layer : layers) features.push_back(layer(features));
    return torch::cat(features, 1);
  }

  std::vector<DenseLayer> layers;
};
TORCH_MODULE(DenseBlock);

struct DenseNetImpl : torch::nn::Module {
  explicit DenseNetImpl(int64_t classes) {
    stem = register_module("stem", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)));
    block1 = register_module("block1", DenseBlock(3, 4, 4));
    transition = register_module("transition",
                                 torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 8, 1).bias(false)));
    block2 = register_module("block2", DenseBlock(2, 8, 4));
    norm = register_module("norm", torch::nn::BatchNorm2d(16));
    fc = register_module("fc", torch::nn::Linear(16, classes));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = block1(stem(x));
    x = torch::avg_pool2d(transition(x), 2);
    x = torch::relu(norm(block2(x)));
    return fc(x.mean({2, 3}));
  }

  torch::nn::Conv2d stem{nullptr}, transition{nullptr};
  DenseBlock block1{nullptr}, block2{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(DenseNet);

/// Ronneberger et al. 2015: the skips join the two ends of the program. One level goes up by a
/// transposed convolution, the other by interpolation; odd sizes are padded.
struct UNetImpl : torch::nn::Module {
  UNetImpl() {
    down1 = register_module("down1", twice(2, 4));
    down2 = register_module("down2", twice(4, 8));
    bottom = register_module("bottom", twice(8, 16));
    up2 = register_module(
        "up2", torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(16, 8, 2).stride(2)));
    merge2 = register_module("merge2", twice(16, 8));
    up1 = register_module("up1", torch::nn::Upsample(torch::nn::UpsampleOptions()
                                                         .scale_factor(std::vector<double>{2, 2})
                                                         .mode(torch::kBilinear)
                                                         .align_corners(true)));
    merge1 = register_module("merge1", twice(12, 4));
    head = register_module("head", torch::nn::Conv2d(4, 1, 1));
  }

  torch::Tensor forward(torch::Tensor x) {
    auto x1 = down1->forward(x);
    auto x2 = down2->forward(torch::max_pool2d(x1, 2));
    auto x3 = bottom->forward(torch::max_pool2d(x2, 2));
    auto y = merge2->forward(join(up2(x3), x2));
    y = merge1->forward(join(up1(y), x1));
    return head(y);
  }

  static torch::nn::Sequential twice(int64_t in, int64_t out) {
    const auto conv = [](int64_t from, int64_t to) {
      return torch::nn::Conv2d(torch::nn::Conv2dOptions(from, to, 3).padding(1).bias(false));
    };
    const auto relu = torch::nn::ReLUOptions(true);
    return torch::nn::Sequential(conv(in, out), torch::nn::BatchNorm2d(out), torch::nn::ReLU(relu),
                                 conv(out, out), torch::nn::BatchNorm2d(out),
                                 torch::nn::ReLU(relu));
  }

  static torch::Tensor join(torch::Tensor up, torch::Tensor skip) {
    const auto rows = skip.size(2) - up.size(2), columns = skip.size(3) - up.size(3);
    up =
        torch::constant_pad_nd(up, {columns / 2, columns - columns / 2, rows / 2, rows - rows / 2});
    return torch::cat({skip, up}, 1);
  }

  torch::nn::Sequential down1{nullptr}, down2{nullptr}, bottom{nullptr}, merge2{nullptr},
      merge1{nullptr};
  torch::nn::ConvTranspose2d up2{nullptr};
  torch::nn::Upsample up1{nullptr};
  torch::nn::Conv2d head{nullptr};
};
TORCH_MODULE(UNet);

/// Szegedy et al. 2014: four branches, concatenated.
struct InceptionBlockImpl : torch::nn::Module {
  explicit InceptionBlockImpl(int64_t in) {
    branch1 = register_module("branch1", conv_norm(in, 4, 1));
    reduce3 = register_module("reduce3", conv_norm(in, 2, 1));
    branch3 = register_module("branch3", conv_norm(2, 4, 3));
    reduce5 = register_module("reduce5", conv_norm(in, 2, 1));
    branch5 = register_module("branch5", conv_norm(2, 2, 5));
    pool = register_module("pool", conv_norm(in, 2, 1));
  }

  torch::Tensor forward(torch::Tensor x) {
    auto a = torch::relu(branch1->forward(x));
    auto b = torch::relu(branch3->forward(torch::relu(reduce3->forward(x))));
    auto c = torch::relu(branch5->forward(torch::relu(reduce5->forward(x))));
    auto d = torch::relu(pool->forward(torch::max_pool2d(x, 3, 1, 1)));
    return torch::cat({a, b, c, d}, 1);
  }

  torch::nn::Sequential branch1{nullptr}, reduce3{nullptr}, branch3{nullptr}, reduce5{nullptr},
      branch5{nullptr}, pool{nullptr};
};
TORCH_MODULE(InceptionBlock);

/// Has an auxiliary classifier that exists in training only.
struct InceptionImpl : torch::nn::Module {
  explicit InceptionImpl(int64_t classes) {
    stem = register_module("stem", conv_norm(3, 6, 3));
    block1 = register_module("block1", InceptionBlock(6));
    block2 = register_module("block2", InceptionBlock(12));
    auxiliary = register_module("auxiliary", torch::nn::Linear(12, classes));
    drop = register_module("drop", torch::nn::Dropout(0.4));
    fc = register_module("fc", torch::nn::Linear(12, classes));
  }

  std::pair<torch::Tensor, std::optional<torch::Tensor>> forward(torch::Tensor x) {
    x = torch::relu(stem->forward(x));
    x = torch::max_pool2d(block1(x), 2);
    std::optional<torch::Tensor> extra;
    if (is_training()) extra = auxiliary(x.mean({2, 3}));
    x = block2(x);
    return {fc(drop(x.mean({2, 3}))), extra};
  }

  torch::nn::Sequential stem{nullptr};
  InceptionBlock block1{nullptr}, block2{nullptr};
  torch::nn::Linear auxiliary{nullptr}, fc{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Inception);

/// Dosovitskiy et al. 2020, with stochastic depth: a branch is left out for some samples.
struct VitBlockImpl : torch::nn::Module {
  VitBlockImpl(int64_t width, int64_t heads, double drop_path)
      : heads(heads), drop_path(drop_path) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    proj = register_module("proj", torch::nn::Linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    mlp = register_module(
        "mlp", torch::nn::Sequential(torch::nn::Linear(width, 2 * width), torch::nn::GELU(),
                                     torch::nn::Linear(2 * width, width)));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = x + some_of(attend(norm1(x)));
    return x + some_of(mlp->forward(norm2(x)));
  }

  torch::Tensor attend(torch::Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    auto parts = qkv(x).reshape({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    auto q = parts[0], k = parts[1], v = parts[2];
    auto attention = (torch::matmul(q, k.transpose(-2, -1)) / std::sqrt(width / heads)).softmax(-1);
    return proj(torch::matmul(attention, v).transpose(1, 2).reshape({batch, length, width}));
  }

  torch::Tensor some_of(torch::Tensor x) {
    if (!is_training()) return x;
    const double keep = 1 - drop_path;
    auto mask = torch::rand({x.size(0), 1, 1}, x.options()).add_(keep).floor_();
    return x.div(keep) * mask;
  }

  int64_t heads;
  double drop_path;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr};
  torch::nn::Sequential mlp{nullptr};
};
TORCH_MODULE(VitBlock);

struct VisionTransformerImpl : torch::nn::Module {
  explicit VisionTransformerImpl(int64_t classes) {
    const int64_t width = 12;
    patches = register_module("patches",
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(3, width, 4).stride(4)));
    class_token = register_parameter("class_token", torch::randn({1, 1, width}) * 0.02);
    positions = register_parameter("positions", torch::randn({1, 5, width}) * 0.02);
    blocks = register_module(
        "blocks", torch::nn::Sequential(VitBlock(width, 3, 0.2), VitBlock(width, 3, 0.4)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    head = register_module("head", torch::nn::Linear(width, classes));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = patches(x).flatten(2).transpose(1, 2);
    x = torch::cat({class_token.expand({x.size(0), -1, -1}), x}, 1) + positions;
    x = norm(blocks->forward(x));
    return head(x.index({torch::indexing::Slice(), 0}));
  }

  torch::nn::Conv2d patches{nullptr};
  torch::Tensor class_token, positions;
  torch::nn::Sequential blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(VisionTransformer);

/// Tolstikhin et al. 2021: linear layers over patches and over channels in turn.
struct MixerBlockImpl : torch::nn::Module {
  MixerBlockImpl(int64_t length, int64_t width) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    tokens = register_module(
        "tokens", torch::nn::Sequential(torch::nn::Linear(length, 2 * length), torch::nn::GELU(),
                                        torch::nn::Linear(2 * length, length)));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    channels = register_module(
        "channels", torch::nn::Sequential(torch::nn::Linear(width, 2 * width), torch::nn::GELU(),
                                          torch::nn::Linear(2 * width, width)));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = x + tokens->forward(norm1(x).transpose(1, 2)).transpose(1, 2);
    return x + channels->forward(norm2(x));
  }

  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Sequential tokens{nullptr}, channels{nullptr};
};
TORCH_MODULE(MixerBlock);

struct MlpMixerImpl : torch::nn::Module {
  explicit MlpMixerImpl(int64_t classes) {
    embed = register_module("embed", torch::nn::Linear(3 * 16, 10));
    for (int i = 0; i < 3; ++i) blocks->push_back(MixerBlock(4, 10));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(10, classes));
  }

  torch::Tensor forward(torch::Tensor x) {
    // 3 x 8 x 8 images into 4 patches of 4 x 4.
    x = x.unfold(2, 4, 4).unfold(3, 4, 4).permute({0, 2, 3, 1, 4, 5}).flatten(3).flatten(1, 2);
    x = embed(x);
    for (auto& block : *blocks) x = block->as<MixerBlock>()->forward(x);
    return head(x.mean(1));
  }

  torch::nn::Linear embed{nullptr}, head{nullptr};
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(MlpMixer);

/// Li et al. 2020, Fourier neural operator: complex weights act on the lowest frequencies.
struct SpectralConvImpl : torch::nn::Module {
  SpectralConvImpl(int64_t channels, int64_t modes) : modes(modes) {
    weight = register_parameter(
        "weight", torch::randn({channels, channels, modes}, torch::kComplexFloat) / channels);
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto frequencies = torch::fft::rfft(x);
    auto out = torch::zeros_like(frequencies);
    const auto low = torch::indexing::Slice(torch::indexing::None, modes);
    out.index_put_({torch::indexing::Ellipsis, low},
                   torch::einsum("bix,iox->box", {frequencies.slice(2, 0, modes), weight}));
    return torch::fft::irfft(out, x.size(-1));
  }

  int64_t modes;
  torch::Tensor weight;
};
TORCH_MODULE(SpectralConv);

struct FourierOperatorImpl : torch::nn::Module {
  FourierOperatorImpl() {
    lift = register_module("lift", torch::nn::Linear(2, kWidth));
    for (int i = 0; i < 3; ++i) {
      spectral.push_back(register_module("spectral" + std::to_string(i), SpectralConv(kWidth, 4)));
      local.push_back(
          register_module("local" + std::to_string(i), torch::nn::Conv1d(kWidth, kWidth, 1)));
    }
    project = register_module("project", torch::nn::Linear(kWidth, 1));
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto grid = torch::linspace(0, 1, x.size(1)).view({1, -1, 1}).expand_as(x);
    x = lift(torch::cat({x, grid}, -1)).permute({0, 2, 1});
    for (size_t i = 0; i < spectral.size(); ++i) {
      x = spectral[i](x) + local[i](x);
      if (i + 1 < spectral.size()) x = torch::gelu(x);
    }
    return project(x.permute({0, 2, 1}));
  }

  static constexpr int64_t kWidth = 6;
  torch::nn::Linear lift{nullptr}, project{nullptr};
  std::vector<SpectralConv> spectral;
  std::vector<torch::nn::Conv1d> local;
};
TORCH_MODULE(FourierOperator);

}  // namespace stranger
