// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "tests/smp/step_fixture.h"

namespace smp::testing {

/// A program that trains a small model and ends with an error.
class ErrorsTest : public StepTest {
 protected:
  /// The error of a training loop that ends with an E. `loss` is called on every rank.
  using Loss = std::function<torch::Tensor(int step, DistributedModel<Mlp>&, torch::Tensor x,
                                           torch::Tensor y)>;
  template <class E>
  std::string error_of_training(int ranks, const Config& config, const Loss& loss) {
    return error_of_run<E>(ranks, config, [&] {
      DistributedModel<Mlp> model(Mlp(4));
      int i = 0;
      auto train = step(
          [&](torch::Tensor x, torch::Tensor y) {
            auto value = loss(i, model, x, y);
            model->backward(value);
            return value;
          },
          StepOptions().name("train"));
      for (; i < 3; ++i) train(x_, y_);
    });
  }

  /// The same for an action that runs in the step function before a proper loss.
  std::string error_in_step(const std::function<void(DistributedModel<Mlp>&)>& action) {
    return error_of_training<UsageError>(
        1, stages(1), [&](int, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor y) {
          auto loss = torch::mse_loss(model(x), y);
          action(model);
          return loss;
        });
  }
};

}  // namespace smp::testing
