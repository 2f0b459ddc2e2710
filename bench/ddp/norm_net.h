// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

namespace mnist {

/// The network of the MNIST example with batch norms, whose buffers are broadcast: images `[batch,
/// 1, 28, 28]` in, log-probabilities of the ten digits `[batch, 10]` out.
class NormNetImpl : public torch::nn::Module {
 public:
  NormNetImpl()
      : conv1_(register_module("conv1", torch::nn::Conv2d(1, 32, 3))),
        norm1_(register_module("norm1", torch::nn::BatchNorm2d(32))),
        conv2_(register_module("conv2", torch::nn::Conv2d(32, 64, 3))),
        norm2_(register_module("norm2", torch::nn::BatchNorm2d(64))),
        dropout1_(register_module("dropout1", torch::nn::Dropout(0.25))),
        fc1_(register_module("fc1", torch::nn::Linear(9216, 128))),
        dropout2_(register_module("dropout2", torch::nn::Dropout(0.5))),
        fc2_(register_module("fc2", torch::nn::Linear(128, 10))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(norm1_(conv1_(x)));
    x = torch::relu(norm2_(conv2_(x)));
    x = dropout1_(torch::max_pool2d(x, 2));
    x = torch::relu(fc1_(torch::flatten(x, 1)));
    return torch::log_softmax(fc2_(dropout2_(x)), 1);
  }

 private:
  torch::nn::Conv2d conv1_;
  torch::nn::BatchNorm2d norm1_;
  torch::nn::Conv2d conv2_;
  torch::nn::BatchNorm2d norm2_;
  torch::nn::Dropout dropout1_;
  torch::nn::Linear fc1_;
  torch::nn::Dropout dropout2_;
  torch::nn::Linear fc2_;
};
TORCH_MODULE(NormNet);

}  // namespace mnist
