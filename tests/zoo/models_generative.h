// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <tuple>
#include <utility>
#include <vector>

/// Models that generate, written in plain libtorch without any knowledge of smp.
namespace stranger {

/// Kingma and Welling 2013: returns reconstruction, mean and logarithm of the variance.
struct VaeImpl : torch::nn::Module {
  VaeImpl() {
    encode1 = register_module("encode1", torch::nn::Linear(20, 12));
    mean = register_module("mean", torch::nn::Linear(12, kLatent));
    log_variance = register_module("log_variance", torch::nn::Linear(12, kLatent));
    decode1 = register_module("decode1", torch::nn::Linear(kLatent, 12));
    decode2 = register_module("decode2", torch::nn::Linear(12, 20));
  }

  std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> forward(torch::Tensor x) {
    const auto hidden = torch::relu(encode1(x));
    const auto mu = mean(hidden), log_var = log_variance(hidden);
    const auto deviation = torch::exp(0.5 * log_var);
    const auto z = mu + torch::randn_like(deviation) * deviation;
    return {decode(z), mu, log_var};
  }

  torch::Tensor decode(torch::Tensor z) { return torch::sigmoid(decode2(torch::relu(decode1(z)))); }

  static constexpr int64_t kLatent = 4;
  torch::nn::Linear encode1{nullptr}, mean{nullptr}, log_variance{nullptr}, decode1{nullptr},
      decode2{nullptr};
};
TORCH_MODULE(Vae);

/// Radford et al. 2015, as in PyTorch's C++ example.
struct GeneratorImpl : torch::nn::Module {
  GeneratorImpl() {
    const auto up = [](int64_t in, int64_t out, int64_t stride, int64_t padding) {
      return torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(in, out, 4)
                                            .stride(stride)
                                            .padding(padding)
                                            .bias(false));
    };
    conv1 = register_module("conv1", up(kNoise, 8, 1, 0));
    norm1 = register_module("norm1", torch::nn::BatchNorm2d(8));
    conv2 = register_module("conv2", up(8, 4, 2, 1));
    norm2 = register_module("norm2", torch::nn::BatchNorm2d(4));
    conv3 = register_module("conv3", up(4, 1, 2, 1));
  }

  torch::Tensor forward(torch::Tensor z) {
    auto x = norm1(conv1(z)).relu_();
    x = norm2(conv2(x)).relu_();
    return torch::tanh(conv3(x));
  }

  static constexpr int64_t kNoise = 5;
  torch::nn::ConvTranspose2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  torch::nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};
};
TORCH_MODULE(Generator);

struct DiscriminatorImpl : torch::nn::Module {
  DiscriminatorImpl() {
    const auto down = [](int64_t in, int64_t out, int64_t stride, int64_t padding) {
      return torch::nn::Conv2d(
          torch::nn::Conv2dOptions(in, out, 4).stride(stride).padding(padding).bias(false));
    };
    const auto leaky = torch::nn::LeakyReLUOptions().negative_slope(0.2).inplace(true);
    net = register_module("net",
                          torch::nn::Sequential(down(1, 4, 2, 1), torch::nn::LeakyReLU(leaky),
                                                down(4, 8, 2, 1), torch::nn::BatchNorm2d(8),
                                                torch::nn::LeakyReLU(leaky), down(8, 1, 1, 0)));
  }

  torch::Tensor forward(torch::Tensor x) { return net->forward(x).view(-1); }

  torch::nn::Sequential net{nullptr};
};
TORCH_MODULE(Discriminator);

/// van den Oord et al. 2017 with the codebook as an exponential moving average: buffers that
/// forward reads, then writes in place without gradients.
struct VectorQuantizerImpl : torch::nn::Module {
  VectorQuantizerImpl(int64_t codes, int64_t width) {
    codebook = register_buffer("codebook", torch::randn({codes, width}));
    counts = register_buffer("counts", torch::ones({codes}));
    sums = register_buffer("sums", codebook.clone());
  }

  std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> forward(torch::Tensor z) {
    const auto flat = z.reshape({-1, z.size(-1)});
    const auto distances =
        flat.pow(2).sum(1, true) - 2 * torch::mm(flat, codebook.t()) + codebook.pow(2).sum(1);
    const auto codes = distances.argmin(1);
    const auto quantized = codebook.index_select(0, codes).view_as(z);
    if (is_training()) update(flat, codes);
    const auto commitment = torch::mse_loss(z, quantized.detach());
    return {z + (quantized - z).detach(), codes.view({z.size(0), -1}), commitment};
  }

  void update(torch::Tensor flat, torch::Tensor codes) {
    torch::NoGradGuard no_grad;
    const auto chosen = torch::one_hot(codes, codebook.size(0)).to(flat.dtype());
    counts.mul_(0.9).add_(chosen.sum(0), 0.1);
    sums.mul_(0.9).add_(chosen.t().mm(flat), 0.1);
    codebook.copy_(sums / (counts + 1e-5).unsqueeze(1));
  }

  torch::Tensor codebook, counts, sums;
};
TORCH_MODULE(VectorQuantizer);

struct VqVaeImpl : torch::nn::Module {
  VqVaeImpl() {
    encode1 = register_module("encode1", torch::nn::Linear(12, 16));
    encode2 = register_module("encode2", torch::nn::Linear(16, 12));
    quantize = register_module("quantize", VectorQuantizer(8, 4));
    decode1 = register_module("decode1", torch::nn::Linear(12, 16));
    decode2 = register_module("decode2", torch::nn::Linear(16, 12));
  }

  std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> forward(torch::Tensor x) {
    const auto z = encode2(torch::relu(encode1(x))).view({x.size(0), 3, 4});
    auto [quantized, codes, commitment] = quantize(z);
    return {decode2(torch::relu(decode1(quantized.flatten(1)))), codes, commitment};
  }

  torch::nn::Linear encode1{nullptr}, encode2{nullptr}, decode1{nullptr}, decode2{nullptr};
  VectorQuantizer quantize{nullptr};
};
TORCH_MODULE(VqVae);

/// Ho et al. 2020: predicts the noise at a random time; `denoise` applies the network over and
/// over, from the last time to the first.
struct DiffusionImpl : torch::nn::Module {
  DiffusionImpl() {
    const auto beta = torch::linspace(1e-2, 0.3, kTimes);
    register_buffer("beta", beta);
    signal = register_buffer("signal", (1 - beta).cumprod(0));
    time = register_module("time", torch::nn::Embedding(kTimes, 8));
    in = register_module("in", torch::nn::Conv1d(torch::nn::Conv1dOptions(1, 8, 3).padding(1)));
    norm = register_module("norm", torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 8)));
    middle =
        register_module("middle", torch::nn::Conv1d(torch::nn::Conv1dOptions(8, 8, 3).padding(1)));
    out = register_module("out", torch::nn::Conv1d(torch::nn::Conv1dOptions(8, 1, 3).padding(1)));
  }

  torch::Tensor forward(torch::Tensor x, torch::Tensor t) {
    auto hidden = torch::silu(in(x) + time(t).unsqueeze(-1));
    hidden = hidden + torch::silu(middle(norm(hidden)));
    return out(hidden);
  }

  torch::Tensor loss(torch::Tensor x) {
    const auto t = torch::randint(kTimes, {x.size(0)}, torch::kLong);
    const auto noise = torch::randn_like(x);
    const auto kept = signal.index({t}).view({-1, 1, 1});
    return torch::mse_loss(forward(kept.sqrt() * x + (1 - kept).sqrt() * noise, t), noise);
  }

  torch::Tensor denoise(torch::Tensor x) {
    torch::NoGradGuard no_grad;
    for (int64_t time = kTimes - 1; time >= 0; --time) {
      const auto t = torch::full({x.size(0)}, time, torch::kLong);
      const auto step = named_buffers()["beta"][time];
      x = (x - step / (1 - signal[time]).sqrt() * forward(x, t)) / (1 - step).sqrt();
      if (time > 0) x = x + step.sqrt() * torch::randn_like(x);
    }
    return x;
  }

  static constexpr int64_t kTimes = 4;
  torch::Tensor signal;
  torch::nn::Embedding time{nullptr};
  torch::nn::Conv1d in{nullptr}, middle{nullptr}, out{nullptr};
  torch::nn::GroupNorm norm{nullptr};
};
TORCH_MODULE(Diffusion);

/// Dinh et al. 2016, a normalising flow: affine couplings with the order reversed between them.
/// Returns the latent and the logarithm of the determinant.
struct FlowImpl : torch::nn::Module {
  FlowImpl() {
    for (int i = 0; i < 4; ++i) {
      couplings.push_back(
          register_module("coupling" + std::to_string(i),
                          torch::nn::Sequential(torch::nn::Linear(3, 10), torch::nn::ReLU(),
                                                torch::nn::Linear(10, 6))));
    }
  }

  std::pair<torch::Tensor, torch::Tensor> forward(torch::Tensor x) {
    auto log_det = torch::zeros({x.size(0)}, x.options());
    for (auto& coupling : couplings) {
      const auto halves = x.chunk(2, 1);
      const auto affine = coupling->forward(halves[0]).chunk(2, 1);
      const auto scale = torch::tanh(affine[0]);
      log_det += scale.sum(1);
      x = torch::cat({halves[0], halves[1] * scale.exp() + affine[1]}, 1).flip(1);
    }
    return {x, log_det};
  }

  std::vector<torch::nn::Sequential> couplings;
};
TORCH_MODULE(Flow);

}  // namespace stranger
