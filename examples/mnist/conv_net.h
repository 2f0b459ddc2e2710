// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

/// The network of the MNIST example that PyTorch and SageMaker's documentation share, in libtorch.
namespace mnist {

/// Images `[batch, 1, 28, 28]` in, log-probabilities of the ten digits `[batch, 10]` out.
class ConvNetImpl : public torch::nn::Module {
 public:
  ConvNetImpl()
      : conv1_(register_module("conv1", torch::nn::Conv2d(1, 32, 3))),
        conv2_(register_module("conv2", torch::nn::Conv2d(32, 64, 3))),
        dropout1_(register_module("dropout1", torch::nn::Dropout(0.25))),
        fc1_(register_module("fc1", torch::nn::Linear(9216, 128))),
        dropout2_(register_module("dropout2", torch::nn::Dropout(0.5))),
        fc2_(register_module("fc2", torch::nn::Linear(128, 10))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv1_(x));
    x = torch::relu(conv2_(x));
    x = dropout1_(torch::max_pool2d(x, 2));
    x = torch::relu(fc1_(torch::flatten(x, 1)));
    return torch::log_softmax(fc2_(dropout2_(x)), 1);
  }

 private:
  torch::nn::Conv2d conv1_, conv2_;
  torch::nn::Dropout dropout1_;
  torch::nn::Linear fc1_;
  torch::nn::Dropout dropout2_;
  torch::nn::Linear fc2_;
};
TORCH_MODULE(ConvNet);

}  // namespace mnist
