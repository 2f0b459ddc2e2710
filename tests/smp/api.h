// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "tests/smp/oracle.h"

namespace smp::testing {

/// A batch and a small model with the same values on every rank.
class ApiTest : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::set_num_threads(1);
    torch::manual_seed(5);
    prototype_ = Mlp(4);
    x_ = torch::randn({8, MlpImpl::kWidth});
    y_ = torch::randn({8, 1});
  }

  /// A net with the values of the prototype; safe on several rank threads at once.
  Mlp make_net() const {
    Mlp net(4);
    copy_values(*prototype_, *net);
    return net;
  }

  /// The loss of every microbatch of a plain net.
  Tensors plain_losses(Mlp net, int microbatches = 2) const {
    torch::NoGradGuard no_grad;
    Tensors losses;
    for (int m = 0; m < microbatches; ++m) {
      losses.push_back(torch::mse_loss(net(part(x_, microbatches, m)), part(y_, microbatches, m)));
    }
    return losses;
  }

  Mlp prototype_{nullptr};
  torch::Tensor x_, y_;
  std::mutex mutex_;
};

}  // namespace smp::testing
