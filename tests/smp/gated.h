// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <vector>

#include "smp/autocast.h"
#include "smp/smp.h"
#include "tests/smp/oracle.h"

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
  explicit GatedImpl(bool opaque) : is_opaque(opaque) {
    in = register_module("in", torch::nn::Linear(5, GateImpl::kWidth));
    gate = register_module("gate", Gate());
    head = register_module("head", torch::nn::Linear(GateImpl::kWidth, 3));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::gelu(in(x));
    return head(is_opaque ? leaf(gate)(x) : gate(x));
  }
  bool is_opaque;
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

inline torch::Tensor gated_loss(Gated& net, const torch::Tensor& x) {
  const amp::Autocast autocast(torch::kBFloat16);
  return net(x).square().mean();
}

/// A training in one plain process, and on ranks.
class GatedTraining {
 public:
  GatedTraining() {
    torch::manual_seed(5);
    Gated plain(/*opaque=*/false);
    for (int i = 0; i < kGatedReplicas; ++i) {
      nets_.emplace_back(/*opaque=*/true);
      copy_values(*plain, *nets_.back());
    }
    train_plain(plain);
  }

  /// On a rank of the runtime: the same bits.
  void train() {
    Gated net = nets_[dp_rank()];
    DistributedModel<Gated> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kOptions);
    auto train = step([&](torch::Tensor x) {
      auto loss = gated_loss(net, x);
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      const Tensors losses = train(part(batch(i), kGatedReplicas, dp_rank())).outputs();
      const auto first = losses_.begin() + i * kCount + dp_rank() * kMicrobatches;
      expect_equal(losses, Tensors(first, first + kMicrobatches), "loss");
      optimizer.step();
    }
    expect_equal(to_map(model->state_dict()), weights_, "weight");
  }

 private:
  static constexpr int kSteps = 3, kMicrobatches = 2, kCount = kGatedReplicas * kMicrobatches;
  inline static const torch::optim::SGDOptions kOptions{0.1};

  static torch::Tensor batch(int number) {
    return torch::linspace(-1, 1, kCount * 2 * 5).reshape({-1, 5}) * (number + 1);
  }

  void train_plain(Gated& plain) {
    const Tensors parameters = unique_parameters(*plain);
    torch::optim::SGD optimizer(parameters, kOptions);
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      const Tensors losses = plain_backward(parameters, kGatedReplicas, kMicrobatches, [&](int m) {
        return gated_loss(plain, part(batch(i), kCount, m));
      });
      losses_.insert(losses_.end(), losses.begin(), losses.end());
      optimizer.step();
    }
    weights_ = state_of(*plain);
  }

  std::vector<Gated> nets_;  // net of each rank
  Tensors losses_;           // losses by step and microbatch
  Named weights_;
};

}  // namespace smp::testing
