// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/adadelta.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <array>
#include <cmath>
#include <sstream>
#include <vector>

#include "core/check.h"

namespace smp::optim {
namespace {

using ::testing::HasSubstr;

torch::Tensor make_param(const std::vector<double>& values) {
  return torch::tensor(values, torch::kDouble).requires_grad_();
}

void set_grad(const torch::Tensor& param, const std::vector<double>& values) {
  param.mutable_grad() = torch::tensor(values, torch::kDouble);
}

/// The published update (Zeiler 2012, algorithm 1) of one number.
struct Reference {
  double x;
  double square_avg = 0;
  double acc_delta = 0;

  void step(double grad, const AdadeltaOptions& options) {
    const double g = grad + options.weight_decay() * x;
    const double rho = options.rho();
    square_avg = rho * square_avg + (1 - rho) * g * g;
    const double delta =
        std::sqrt(acc_delta + options.eps()) / std::sqrt(square_avg + options.eps()) * g;
    acc_delta = rho * acc_delta + (1 - rho) * delta * delta;
    x -= options.lr() * delta;
  }
};

class AdadeltaTest : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_F(AdadeltaTest, FollowsThePublishedFormulaForThreeSteps) {
  for (const auto& options :
       {AdadeltaOptions(), AdadeltaOptions(0.5).rho(0.7).eps(1e-3).weight_decay(0.1)}) {
    const torch::Tensor param = make_param({1.0, -2.0});
    Adadelta optimizer({param}, options);
    std::array<Reference, 2> reference = {Reference{1.0}, Reference{-2.0}};
    const std::vector<std::vector<double>> grads = {{0.5, -3.0}, {0.25, 1.0}, {-1.0, 0.0}};
    for (const auto& grad : grads) {
      set_grad(param, grad);
      optimizer.step();
      for (int64_t i = 0; i < 2; ++i) {
        reference[i].step(grad[i], options);
        EXPECT_NEAR(param[i].item<double>(), reference[i].x, 1e-14);
      }
    }
    const auto& state =
        static_cast<const AdadeltaParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
    EXPECT_EQ(state.step(), 3);
    EXPECT_NEAR(state.square_avg()[1].item<double>(), reference[1].square_avg, 1e-14);
    EXPECT_NEAR(state.acc_delta()[1].item<double>(), reference[1].acc_delta, 1e-14);
  }
}

TEST_F(AdadeltaTest, FirstStepMatchesTheNumbersWorkedOutByHand) {
  // eps = 0.19, rho = 0.9, g = 3: E[g^2] = 0.9, dx = sqrt(0.19) / sqrt(1.09) * 3 and
  // E[dx^2] = 0.1 * 9 * 0.19 / 1.09.
  const torch::Tensor param = make_param({1.0});
  Adadelta optimizer({param}, AdadeltaOptions().eps(0.19));
  set_grad(param, {3.0});
  optimizer.step();
  EXPECT_NEAR(param.item<double>(), 1.0 - 1.2525204, 1e-7);
}

TEST_F(AdadeltaTest, RunsTheClosureAndSkipsParametersWithoutGradient) {
  const torch::Tensor used = make_param({1.0});
  const torch::Tensor unused = make_param({5.0});
  Adadelta optimizer({used, unused});
  const torch::Tensor loss = optimizer.step([&] {
    const torch::Tensor value = (used * used).sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<double>(), 1.0);
  EXPECT_LT(used.item<double>(), 1.0);
  EXPECT_EQ(unused.item<double>(), 5.0);
  EXPECT_EQ(optimizer.state().size(), 1u);
}

TEST_F(AdadeltaTest, ObeysALearningRateScheduler) {
  const torch::Tensor param = make_param({1.0});
  Adadelta optimizer({param}, AdadeltaOptions(0.8));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  // The first call of StepLR::step only starts its count.
  Reference reference{1.0};
  for (const double lr : {0.8, 0.8, 0.4}) {
    set_grad(param, {2.0});
    optimizer.step();
    scheduler.step();
    reference.step(2.0, AdadeltaOptions(lr));
    EXPECT_NEAR(param.item<double>(), reference.x, 1e-14);
  }
}

TEST_F(AdadeltaTest, ContinuesAfterTorchSaveAndLoad) {
  const torch::Tensor param = make_param({1.0, 2.0});
  Adadelta optimizer({param}, AdadeltaOptions(0.5));
  set_grad(param, {0.5, -1.0});
  optimizer.step();
  std::stringstream stream;
  torch::save(optimizer, stream);

  const torch::Tensor copy = param.detach().clone().requires_grad_();
  Adadelta restored({copy});
  torch::load(restored, stream);
  EXPECT_EQ(static_cast<AdadeltaOptions&>(restored.param_groups()[0].options()),
            static_cast<AdadeltaOptions&>(optimizer.param_groups()[0].options()));
  EXPECT_EQ(static_cast<AdadeltaParamState&>(*restored.state().at(copy.unsafeGetTensorImpl())),
            static_cast<AdadeltaParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl())));
  for (const auto& tensor : {param, copy}) {
    set_grad(tensor, {1.0, 1.0});
  }
  optimizer.step();
  restored.step();
  EXPECT_TRUE(torch::equal(param, copy));
}

TEST_F(AdadeltaTest, RefusesOptionsOutOfRangeAndSparseGradients) {
  const torch::Tensor param = make_param({1.0});
  try {
    Adadelta optimizer({param}, AdadeltaOptions().rho(1.5));
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("Adadelta option rho: expected 0 to 1, got 1.5."));
  }
  Adadelta optimizer({param});
  param.mutable_grad() = torch::ones({1}, torch::kDouble).to_sparse();
  try {
    optimizer.step();
    FAIL() << "expected UsageError";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("expected dense gradients, got a sparse one for a "
                                        "parameter of shape [1]"));
  }
}

}  // namespace
}  // namespace smp::optim
