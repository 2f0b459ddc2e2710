// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/graph/harness.h"

/// Programs around a small model, each compared with plain libtorch.
namespace smp::graph::testing {

struct NumberNetImpl : torch::nn::Module {
  torch::nn::Linear fc{nullptr}, out{nullptr};
  torch::Tensor scale;
  NumberNetImpl() {
    fc = register_module("fc", torch::nn::Linear(4, 4));
    out = register_module("out", torch::nn::Linear(4, 4));
    scale = register_buffer("scale", torch::ones({4, 4}));
  }
  torch::Tensor forward(torch::Tensor x) { return out(torch::tanh(fc(x))); }
};
TORCH_MODULE(NumberNet);

class Numbers : public ::testing::Test {
 protected:
  Numbers() : net_(make_net()), table_(table_of(*net_)) {}

  static NumberNet make_net() {
    torch::manual_seed(3);
    return NumberNet();
  }

  void expect_equals_eager(const Function& function) {
    expect_replay_equals_eager(*net_, {x_}, {torch::randn({4, 4}, torch::kFloat)}, function);
    const TraceResult first = trace(table_, {x_}, function);
    EXPECT_EQ(again(first, function).match, first.recorded.get());
  }

  TraceResult again(const TraceResult& first, const Function& function) {
    return trace(table_, {x_}, function, false, {first.recorded.get()});
  }

  NumberNet net_;
  TensorTable table_;
  torch::Tensor x_ = torch::randn({4, 4});
};

/// Does the same as model->backward, with gradients.
inline void backward_with(const Tensors& tensors, const Tensors& gradients) {
  if (auto* tracer = Tracer::current()) {
    tracer->backward(tensors, gradients);
  } else {
    torch::autograd::backward(tensors, gradients);
  }
}

}  // namespace smp::graph::testing
