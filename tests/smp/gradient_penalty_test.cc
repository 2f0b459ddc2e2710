// SPDX-License-Identifier: Apache-2.0
// Step functions that call autograd::grad: gradient penalties, physics-informed losses, a step of
// gradient descent inside. The same numbers as plain libtorch, to the bit.

#include "tests/smp/parity.h"

namespace smp::testing {
namespace {

using parity::Layout;
using torch::autograd::grad;

constexpr int64_t kWidth = 6;

/// A trunk, a function of its result that is differentiated, and a head after that: the stages of
/// a pipeline may end before and after the function only.
struct BaseImpl : torch::nn::Module {
  BaseImpl() {
    trunk = register_module("trunk", make(kWidth));
    inner = register_module("inner", make(1));
    head = register_module("head", make(1));
  }

  static torch::nn::Sequential make(int64_t out) {
    return torch::nn::Sequential(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh(),
                                 torch::nn::Linear(kWidth, out));
  }
  static Tensors batch(int64_t size) {
    return {torch::randn({size, kWidth}), torch::randn({size, 1})};
  }
  torch::nn::Sequential trunk{nullptr}, inner{nullptr}, head{nullptr};
};

/// Wasserstein with a gradient penalty, on points between the trunk's output and noise.
struct CriticImpl : BaseImpl {
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const torch::AutoGradMode with_history(true);  // in an evaluation, too
    auto h = torch::dropout(torch::tanh(trunk->forward(x)), 0.25, is_training());
    // The oracle's evaluations draw no random numbers.
    auto mix = is_training() ? torch::rand({x.size(0), 1}) : torch::full({x.size(0), 1}, 0.25);
    auto between = (mix * h.detach() + (1 - mix) * x).requires_grad_(true);
    auto score = inner->forward(between);
    auto slope = grad({score}, {between}, {torch::ones_like(score)}, true, true)[0];
    auto penalty = (slope.flatten(1).norm(2, 1) - 1).pow(2).mean();
    return inner->forward(h).mean() + 10 * penalty + (head->forward(h) - y).pow(2).mean();
  }
};
TORCH_MODULE(Critic);

/// u'' + u = 0 at the points, and data: a derivative of a derivative of a derivative.
struct PhysicsImpl : BaseImpl {
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const torch::AutoGradMode with_history(true);
    x.requires_grad_();
    auto u = inner->forward(x);
    auto first = grad({u.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    auto second = grad({first.sum()}, {x}, {}, true, true)[0];
    auto residual = (second.sum(1, true) + u).pow(2).mean();
    return residual + (head->forward(trunk->forward(x) * u) - y).pow(2).mean();
  }
};
TORCH_MODULE(Physics);

/// Differentiates with respect to a result of the stage before; its gradient is used as a number
/// only.
struct SaliencyImpl : BaseImpl {
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const torch::AutoGradMode with_history(true);
    auto h = trunk->forward(x);
    auto slope = grad({inner->forward(h).pow(3).sum()}, {h}, {}, /*retain_graph=*/true)[0];
    EXPECT_FALSE(slope.requires_grad());
    return (head->forward(h * torch::sigmoid(slope)) - y).pow(2).mean() + inner->forward(h).mean();
  }
};
TORCH_MODULE(Saliency);

/// A step of gradient descent on the inner weights, then the loss with the new weights. One of the
/// weights is not used.
struct LearnerImpl : BaseImpl {
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const torch::AutoGradMode with_history(true);
    auto h = torch::tanh(trunk->forward(x));
    auto weights = inner->parameters();
    weights.push_back(head->parameters()[0]);
    auto before = (inner->forward(h) - y).pow(2).mean();
    auto slopes = grad({before}, weights, {}, true, true, /*allow_unused=*/true);
    EXPECT_FALSE(slopes.back().defined());
    for (size_t i = 0; i + 1 < weights.size(); ++i) weights[i] = weights[i] - 0.5 * slopes[i];
    auto after = torch::linear(torch::tanh(torch::linear(h, weights[0], weights[1])), weights[2],
                               weights[3]);
    return (after - y).pow(2).mean() + (head->forward(h) - y).pow(2).mean();
  }
};
TORCH_MODULE(Learner);

class GradientPenalty : public ::testing::TestWithParam<Layout> {
 protected:
  template <class Net>
  void check() {
    parity::check<Net, torch::optim::SGD>(
        GetParam(), [] { return Net(); }, torch::optim::SGDOptions(0.05).momentum(0.5));
  }
};

TEST_P(GradientPenalty, OfACritic) { check<Critic>(); }
TEST_P(GradientPenalty, OfAnEquation) { check<Physics>(); }
TEST_P(GradientPenalty, WithoutASecondDerivative) { check<Saliency>(); }
TEST_P(GradientPenalty, WithRespectToWeights) { check<Learner>(); }

INSTANTIATE_TEST_SUITE_P(Layouts, GradientPenalty,
                         ::testing::Values(Layout{1, 1, 2, "simple"}, Layout{2, 1, 3, "simple"},
                                           Layout{2, 2, 2, "interleaved"},
                                           Layout{2, 1, 4, "zb_h1"}));

// -- Other settings that change how a step runs

/// The weights after training in a configuration that leaves gradients elsewhere, or that rounds.
template <class Net>
void check_weights(const Layout& layout, const std::function<void(Config&)>& change,
                   bool to_the_bit) {
  const std::function<Net()> make = [] {
    Net net;
    net->to(torch::kDouble);
    return net;
  };
  auto tested =
      parity::training<Net, torch::optim::SGD>(layout, make, torch::optim::SGDOptions(0.05));
  tested.batch = [floats = tested.batch](int step) {
    const auto batch = floats(step);
    return Tensors{batch[0].to(torch::kDouble), batch[1].to(torch::kDouble)};
  };
  tested.evaluates = false;
  tested.prepare = [](Net& net) { set_tensor_parallelism(*net); };
  change(tested.config);
  const Named got = tested.run_on_ranks().weights, expected = tested.run_plain().weights;
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, value] : expected) {
    EXPECT_TRUE(to_the_bit ? torch::equal(got.at(name), value)
                           : torch::allclose(got.at(name), value, 1e-9, 1e-12))
        << name;
  }
}

template <class Net>
class Configured : public ::testing::Test {};

using Nets = ::testing::Types<Critic, Physics, Saliency, Learner>;
TYPED_TEST_SUITE(Configured, Nets);

TYPED_TEST(Configured, ShardedParameters) {
  check_weights<TypeParam>(
      {1, 2, 2, "simple"},
      [](Config& config) {
        config.sharded_data_parallel_degree(2)
            .sdp_param_persistence_threshold(1)
            .sdp_gradient_clipping(1e9);
      },
      true);
}

TYPED_TEST(Configured, ShardedOptimizerState) {
  check_weights<TypeParam>(
      {2, 2, 2, "interleaved"}, [](Config& config) { config.shard_optimizer_state(true); }, true);
}

TYPED_TEST(Configured, FusedGradients) {
  check_weights<TypeParam>(
      {2, 1, 3, "zb_h1"}, [](Config& config) { config.gradient_accumulation_fusion(true); }, false);
}

TYPED_TEST(Configured, FastNumerics) {
  check_weights<TypeParam>(
      {2, 1, 4, "interleaved"}, [](Config& config) { config.numerics("fast"); }, false);
}

TYPED_TEST(Configured, TensorParallelism) {
  check_weights<TypeParam>(
      {1, 2, 2, "simple"}, [](Config& config) { config.tensor_parallel_degree(2); }, false);
}

}  // namespace
}  // namespace smp::testing
