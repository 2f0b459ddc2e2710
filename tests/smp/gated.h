// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include "smp/autocast.h"
#include "tests/smp/training_case.h"

/// A model with a leaf module, trained under autocast with sharded parameters.
namespace smp::testing {

/// Goes one of two ways, by the data; casts its weight once under autocast and uses it twice.
struct GateImpl : torch::nn::Module {
  GateImpl() : fc(register_module("fc", torch::nn::Linear(kWidth, kWidth))) {}
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(fc(x));
    return x.sum().item<double>() > 0 ? fc(x) : -fc(x);
  }
  static constexpr int64_t kWidth = 8;
  torch::nn::Linear fc;
};
TORCH_MODULE(Gate);

struct GatedImpl : torch::nn::Module {
  GatedImpl() {
    in = register_module("in", torch::nn::Linear(5, GateImpl::kWidth));
    gate = register_module("gate", Gate());
    head = register_module("head", torch::nn::Linear(GateImpl::kWidth, 3));
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor /*y*/) {
    const amp::Autocast autocast(torch::kBFloat16);
    x = torch::gelu(in(x));
    return head(is_opaque ? leaf(gate)(x) : gate(x)).square().mean();
  }
  bool is_opaque = false;
  torch::nn::Linear in{nullptr}, head{nullptr};
  Gate gate{nullptr};
};
TORCH_MODULE(Gated);

constexpr int kGatedReplicas = 2;

/// The configuration of `degree` replicas that divide the parameters.
inline Config gated_config(int degree) {
  return Config()
      .microbatches(2)
      .ddp(true)
      .sharded_data_parallel_degree(degree)
      .sdp_param_persistence_threshold(4)
      .sdp_gradient_clipping(1e9)
      .seed(kSeed)
      .timeout_seconds(60);
}

/// The training of replicas, on which the gate is a leaf.
inline auto gated_case(int degree) {
  const torch::optim::SGDOptions options(0.1);
  TrainingCase<Gated, Recipe<torch::optim::SGD, torch::optim::SGDOptions>> result(
      [] { return Gated(); }, {options});
  result.config = gated_config(degree);
  result.ranks = result.shards = kGatedReplicas;
  result.microbatches = 2 * kGatedReplicas;
  result.batch = [](int step) {
    const auto x = torch::linspace(-1, 1, 4 * kGatedReplicas * 5).reshape({-1, 5}) * (step + 1);
    return Tensors{x, x};
  };
  result.evaluates = false;
  result.prepare = [](Gated& net) { net->is_opaque = true; };
  return result;
}

}  // namespace smp::testing
