// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include "smp/smp.h"

/// The network of `conv_net.h` in two halves, each made under a partition scope.
namespace mnist {

/// Images `[batch, 1, 28, 28]` in, features `[batch, 9216]` out.
class FeaturesImpl : public torch::nn::Module {
 public:
  FeaturesImpl()
      : conv1_(register_module("conv1", torch::nn::Conv2d(1, 32, 3))),
        conv2_(register_module("conv2", torch::nn::Conv2d(32, 64, 3))),
        dropout1_(register_module("dropout1", torch::nn::Dropout(0.25))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv1_(x));
    x = torch::relu(conv2_(x));
    return torch::flatten(dropout1_(torch::max_pool2d(x, 2)), 1);
  }

 private:
  torch::nn::Conv2d conv1_, conv2_;
  torch::nn::Dropout dropout1_;
};
TORCH_MODULE(Features);

/// Features `[batch, 9216]` in, log-probabilities of the ten digits `[batch, 10]` out.
class ClassifierImpl : public torch::nn::Module {
 public:
  ClassifierImpl()
      : fc1_(register_module("fc1", torch::nn::Linear(9216, 128))),
        dropout2_(register_module("dropout2", torch::nn::Dropout(0.5))),
        fc2_(register_module("fc2", torch::nn::Linear(128, 10))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(fc1_(x));
    return torch::log_softmax(fc2_(dropout2_(x)), 1);
  }

 private:
  torch::nn::Linear fc1_;
  torch::nn::Dropout dropout2_;
  torch::nn::Linear fc2_;
};
TORCH_MODULE(Classifier);

/// Images `[batch, 1, 28, 28]` in, log-probabilities of the ten digits `[batch, 10]` out.
class GroupedNetImpl : public torch::nn::Module {
 public:
  GroupedNetImpl() {
    {
      const auto scope = smp::partition(0);
      features_ = register_module("features", Features());
    }
    const auto scope = smp::partition(1);
    classifier_ = register_module("classifier", Classifier());
  }

  torch::Tensor forward(torch::Tensor x) { return classifier_(features_(x)); }

 private:
  Features features_{nullptr};
  Classifier classifier_{nullptr};
};
TORCH_MODULE(GroupedNet);

}  // namespace mnist
