// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/dp/replicas.h"

/// Small models, and passes that compute a loss and call backward.
namespace smp::dp::testing {

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    first = register_module("first", torch::nn::Linear(6, 8));
    second = register_module("second", torch::nn::Linear(8, 3));
  }
  torch::Tensor forward(torch::Tensor x) { return second(torch::relu(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Mlp);

inline const auto kMakeMlp = [] { return Mlp(); };

inline const auto kOnePass = [](auto& model, const Batch& batch) {
  torch::mse_loss(model(batch.x), batch.y).backward();
};

/// A bucket for every parameter or two.
inline DDPOptions small_buckets() {
  return DDPOptions().first_bucket_cap_mb(1e-4).bucket_cap_mb(2e-4);
}

/// A shared_ptr to a module instead of its holder; convolutions with parameters of other strides,
/// batch norms whose buffers follow the first replica.
struct ConvBlock : torch::nn::Module {
  ConvBlock() {
    conv = register_module("conv", torch::nn::Conv2d(2, 4, 3));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    out = register_module("out", torch::nn::Linear(16, 3));
  }
  torch::Tensor forward(torch::Tensor x) { return out(torch::relu(norm(conv(x))).flatten(1)); }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear out{nullptr};
};

inline const auto kPassOfPointer = [](auto& model, const Batch& batch) {
  using Model = std::decay_t<decltype(model)>;
  if constexpr (std::is_same_v<Model, std::shared_ptr<ConvBlock>>) {
    torch::mse_loss(model->forward(batch.x), batch.y).backward();
  } else {
    torch::mse_loss(model(batch.x), batch.y).backward();
  }
};

/// Takes another branch in each step and rank, and never the last.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    in = register_module("in", torch::nn::Linear(6, 8));
    for (int i = 0; i < 4; ++i) {
      branches.push_back(register_module("branch" + std::to_string(i), torch::nn::Linear(8, 8)));
    }
    out = register_module("out", torch::nn::Linear(8, 3));
  }
  std::map<std::string, std::vector<torch::Tensor>> forward(torch::Tensor x, int branch) {
    return {{"result", {out(branches.at(branch)(torch::relu(in(x))))}}};
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
  std::vector<torch::nn::Linear> branches;
};
TORCH_MODULE(Branches);

inline const auto kBranchOfRank = [](auto& model, const Batch& batch) {
  auto outputs = model(batch.x, (batch.rank + batch.step + batch.pass) % 3);
  torch::mse_loss(outputs.at("result").at(0), batch.y).backward();
};

/// Runs a layer again in the backward pass, by a backward pass of its own.
struct Rerun : torch::autograd::Function<Rerun> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x,
                               torch::nn::Linear layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer.ptr().get());
    return layer(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    torch::AutoGradMode with_history(true);
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    layer->forward(x).backward(gradients[0]);
    return {x.grad(), torch::Tensor()};
  }
};

struct RerunningImpl : torch::nn::Module {
  RerunningImpl() {
    in = register_module("in", torch::nn::Linear(6, 6));
    twice = register_module("twice", torch::nn::Linear(6, 6));
    out = register_module("out", torch::nn::Linear(6, 3));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = Rerun::apply(torch::relu(in(x)), twice);
    return out(Rerun::apply(torch::relu(x), twice));
  }
  torch::nn::Linear in{nullptr}, twice{nullptr}, out{nullptr};
};
TORCH_MODULE(Rerunning);

}  // namespace smp::dp::testing
