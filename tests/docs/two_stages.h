// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <functional>
#include <vector>

#include "smp/smp.h"

/// A small net on two stages, which the examples of several pages train.
namespace smp::testing {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    fc1 = register_module("fc1", torch::nn::Linear(8, 16));
    fc2 = register_module("fc2", torch::nn::Linear(16, 3));
  }
  torch::Tensor forward(torch::Tensor x) { return fc2(torch::relu(fc1(x))); }

  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

/// Calls `program` on two stages with two nets; modules are made before, since ranks as threads
/// share a generator.
inline void on_two_stages(const std::function<void(Net net, Net other)>& program) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  std::vector<Net> nets{Net(), Net()}, others{Net(), Net()};
  run_as_threads(2, Config().partitions(2).microbatches(2).seed(7),
                 [&] { program(nets[rank()], others[rank()]); });
}

inline auto make_training(DistributedModel<Net>& model) {
  return step([&model](torch::Tensor x, torch::Tensor y) {
    auto loss = torch::cross_entropy_loss(model(x), y);
    model->backward(loss);
    return loss;
  });
}

inline torch::Tensor inputs() { return torch::linspace(-1, 1, 64).view({8, 8}); }
inline torch::Tensor targets() { return torch::arange(8) % 3; }

}  // namespace smp::testing
