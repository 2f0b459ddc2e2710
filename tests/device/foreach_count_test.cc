// SPDX-License-Identifier: Apache-2.0
// Kernels that the device is given for an update, for the sums of gradients, and for a look at
// them.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <typeinfo>
#include <vector>

#include "comm/threads/run_ranks.h"
#include "core/numbers.h"
#include "dp/local_gradients.h"
#include "optim/foreach_step.h"
#include "runtime/update/gradient_probes.h"
#include "smp/smp.h"
#include "tests/device/fake_device.h"

namespace smp::testing {
namespace {

using Tensors = std::vector<torch::Tensor>;

constexpr int kParameters = 50;

Tensors make_parameters() {
  Tensors parameters;
  for (int64_t i = 0; i < kParameters; ++i) {
    auto parameter = torch::ones({i + 1, 3}, fake_device()).requires_grad_();
    parameter.mutable_grad() = torch::ones_like(parameter.detach());
    parameters.push_back(parameter);
  }
  return parameters;
}

bool step_by_lists(torch::optim::Optimizer& optimizer) {
  return optim::foreach_step(optimizer, typeid(optimizer),
                             [](const torch::Tensor&) { return false; });
}

TEST(Kernels, OfAnUpdateAreNineForAllParameters) {
  torch::optim::AdamW optimizer(make_parameters(), torch::optim::AdamWOptions(0.1));
  ASSERT_TRUE(step_by_lists(optimizer));  // which makes states
  take_fake_kernels();
  ASSERT_TRUE(step_by_lists(optimizer));
  EXPECT_EQ(take_fake_kernels(), 9);
  optimizer.step();
  EXPECT_GE(take_fake_kernels(), 8 * kParameters) << "libtorch's own step";
}

TEST(Kernels, OfAnUpdateAreNineForEachCountOfSteps) {
  const Tensors parameters = make_parameters();
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.1));
  const auto grad = parameters[7].grad();
  parameters[7].mutable_grad().reset();
  ASSERT_TRUE(step_by_lists(optimizer));
  parameters[7].mutable_grad() = grad;
  ASSERT_TRUE(step_by_lists(optimizer));
  take_fake_kernels();
  ASSERT_TRUE(step_by_lists(optimizer));
  EXPECT_EQ(take_fake_kernels(), 2 * 9);
}

/// One that lies otherwise than its gradient has a kernel of its own; the others keep theirs.
TEST(Kernels, OfAnUpdateAreFewWhereOneParameterLiesOtherwise) {
  Tensors parameters = make_parameters();
  auto transposed = torch::ones({4, 5}, fake_device()).t().detach().requires_grad_();
  transposed.mutable_grad() = torch::ones({5, 4}, fake_device());
  parameters.insert(parameters.begin(), transposed);
  torch::optim::SGD optimizer(parameters, 0.1);
  take_fake_kernels();
  ASSERT_TRUE(step_by_lists(optimizer));
  EXPECT_EQ(take_fake_kernels(), 2);
}

/// Batches are bounded, and so is the memory for intermediate results.
TEST(Kernels, OfAnUpdateTakeSoManyElements) {
  constexpr int64_t kElements = 11000000;
  Tensors parameters;
  for (int i = 0; i < 2; ++i) {
    auto parameter = torch::zeros({kElements}, fake_device()).requires_grad_();
    parameter.mutable_grad() = torch::ones({kElements}, fake_device());
    parameters.push_back(parameter);
  }
  torch::optim::SGD optimizer(parameters, 0.5);
  take_fake_kernels();
  ASSERT_TRUE(step_by_lists(optimizer));
  EXPECT_EQ(take_fake_kernels(), 2);
  for (const auto& parameter : parameters) {
    EXPECT_EQ(parameter.detach()[kElements - 1].item<float>(), -0.5f);
  }
}

/// Gradients of microbatches that ran as graphs.
class Sums {
 public:
  static constexpr int kMicrobatches = 3;

  explicit Sums(const comm::CommunicatorPtr& alone) {
    std::vector<std::string> names;
    for (const auto& parameter : make_parameters()) {
      given_.push_back({parameters_.size(), torch::full_like(parameter.detach(), 2)});
      names.push_back(std::to_string(parameters_.size()));
      parameters_.push_back(parameter.detach().requires_grad_());
    }
    dp::StepGradientOptions options;
    options.microbatches = kMicrobatches;
    options.divisor = kMicrobatches;
    gradients_.emplace(parameters_, names, alone, options);
  }

  /// Returns how many kernels that took.
  int add(int microbatch) {
    take_fake_kernels();
    gradients_->add(microbatch, given_);
    return take_fake_kernels();
  }
  int finish() {
    take_fake_kernels();
    gradients_->reduce();
    gradients_->finish();
    return take_fake_kernels();
  }
  void expect_grad(float value) const {
    for (const auto& parameter : parameters_) {
      EXPECT_TRUE(torch::equal(parameter.grad().cpu(), torch::full(parameter.sizes(), value)));
    }
  }

 private:
  Tensors parameters_;
  std::vector<dp::StepGradients::Given> given_;
  std::optional<dp::LocalGradients> gradients_;
};

TEST(Kernels, OfSumsAreOneForAllParameters) {
  comm::run_ranks(1, [](const comm::CommunicatorPtr& alone) {
    Sums sums(alone);
    for (int m = 0; m < Sums::kMicrobatches; ++m) EXPECT_EQ(sums.add(m), 1) << "microbatch " << m;
    EXPECT_EQ(sums.finish(), 1) << "the division";
    sums.expect_grad(2);
    for (int m = 0; m < Sums::kMicrobatches; ++m) EXPECT_EQ(sums.add(m), 1) << "microbatch " << m;
    EXPECT_EQ(sums.finish(), 2) << "the division, and the addition to `.grad`";
    sums.expect_grad(4);
  });
}

TEST(Kernels, OfNumbersThatAreReadAreOne) {
  Tensors numbers;
  std::vector<double> expected;
  for (int i = 0; i < 10; ++i) {
    numbers.push_back(torch::full({}, 0.5 * i, fake_device()));
    expected.push_back(0.5 * i);
  }
  take_fake_kernels();
  EXPECT_EQ(core::read_numbers(numbers), expected);
  EXPECT_EQ(take_fake_kernels(), 2) << "one, and a copy";
}

/// A sum of types would round an integer that float32 does not have.
TEST(Kernels, OfNumbersOfOtherTypesRoundNone) {
  const int64_t odd = (int64_t{1} << 40) + 1;
  const Tensors numbers = {
      torch::full({}, odd, torch::TensorOptions(fake_device()).dtype(torch::kLong)),
      torch::full({1}, 0.5, fake_device()), torch::full({}, 3.0)};
  EXPECT_EQ(core::read_numbers(numbers), (std::vector<double>{static_cast<double>(odd), 0.5, 3}));
}

TEST(Kernels, OfALookAtGradientsAreOneForAllParameters) {
  const Tensors parameters = make_parameters();
  runtime::GradientProbes probes;
  take_fake_kernels();
  probes.look(parameters);
  EXPECT_EQ(take_fake_kernels(), 1);
  for (const auto& parameter : parameters) parameter.grad().mul_(0.25);
  take_fake_kernels();
  EXPECT_EQ(probes.factor(), 0.25);
  EXPECT_EQ(take_fake_kernels(), 3) << "those of now, both, and a copy";
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < kParameters; ++i) {
      weights.push_back(register_parameter("weight" + std::to_string(i), torch::ones({3})));
    }
  }
  Tensors weights;
};
TORCH_MODULE(Net);

/// Masters are rounded into weights of half precision in one kernel more.
TEST(Kernels, OfADistributedOptimizersUpdateAreAsFew) {
  torch::set_num_threads(1);
  for (const bool half : {false, true}) {
    run_as_threads(1, Config().bf16(half).microbatches(2).timeout_seconds(60), [&] {
      set_device(0);
      Net net;
      DistributedModel<Net> model(net);
      DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                          torch::optim::AdamWOptions(0.1));
      auto train = step([&](torch::Tensor x) {
        auto sum = x.sum();
        for (const auto& weight : net->weights) sum = sum + (weight * x).sum();
        model->backward(sum);
        return sum;
      });
      int kernels = 0;
      for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        train(torch::ones({2, 3}));
        take_fake_kernels();
        optimizer.step();
        kernels = take_fake_kernels();
      }
      EXPECT_LE(kernels, half ? 12 : 10);
    });
  }
}

}  // namespace
}  // namespace smp::testing
