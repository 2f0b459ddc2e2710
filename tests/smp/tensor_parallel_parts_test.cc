// SPDX-License-Identifier: Apache-2.0
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/smp/tensor_parallel.h"

// A plain module that the first step has divided, used by the program's own pointer outside of
// steps: operators that need whole parameters are refused by the parameters' names, operators that
// go element by element are not.
namespace smp {
namespace {

using namespace testing;
using torch::Tensor;

constexpr int64_t kIn = 8, kOut = 12;

struct Layer : torch::nn::Module {
  Layer() { fc = register_module("fc", torch::nn::Linear(kIn, kOut)); }
  Tensor forward(Tensor x) { return fc(x); }
  torch::nn::Linear fc{nullptr};
};

Tensor input() { return torch::arange(4 * kIn, torch::kDouble).reshape({4, kIn}) / 10; }

template <class Net>
Tensor loss_of(Net& net, const Tensor& x) {
  return net.forward(x).pow(2).mean();
}

/// Runs `use` on each of two ranks after a step that has divided a marked net.
template <class Net>
void after_a_step(const Tensor& x, const std::function<void(Net& net, ModelOf<Net>& model)>& use,
                  const TensorLayout& layout = {2, 1, 1, true}) {
  run_as_threads(layout.ranks(), config_of(layout).microbatches(2), [&] {
    const auto net = make_model<Net>(5);
    set_tensor_parallelism(*net);
    ModelOf<Net> model(net);
    net->forward(x);  // every rank still has all of it
    step([&](Tensor a) {
      Tensor loss = loss_of(*net, a);
      model->backward(loss);
      return loss;
    })(x);
    use(*net, model);
  });
}

void expect_refused(const std::string& text, const std::string& op, const std::string& parameter) {
  expect_has(text, {"operator " + op + " needs all of parameter \"" + parameter + "\"",
                    "which the ranks of a tensor-parallel group divide: this rank has a part of "
                    "these numbers",
                    "smp::step(", "model->cpu()", "model->state_dict()"});
}

TEST(PartsOutsideSteps, ALinearLayerIsRefused) {
  after_a_step<Layer>(input(), [](Layer& net, auto& model) {
    ASSERT_TRUE(model->is_distributed_parameter(net.fc->weight));
    const auto refused = [&] {
      expect_refused(error_of<UsageError>([&] { net.forward(input()); }), "aten::addmm", "fc.bias");
    };
    refused();
    {
      const torch::NoGradGuard no_grad;
      refused();
    }
    const c10::InferenceMode inference;
    expect_refused(error_of<UsageError>([&] { net.forward(input()); }), "aten::addmm", "fc.bias");
  });
}

/// The text names the part that is first among the operator's arguments.
TEST(PartsOutsideSteps, WhatIsComputedOfAPartIsOne) {
  after_a_step<Layer>(input(), [](Layer& net, auto&) {
    namespace F = torch::nn::functional;
    const Tensor w = net.fc->weight;
    const std::vector<Tensor> all = {w.detach(),
                                     w.clone(),
                                     w * 2,
                                     2 - w,
                                     w / w.norm(),
                                     w.to(torch::kFloat).to(w),
                                     w.chunk(3)[0],
                                     torch::tanh(w),
                                     torch::cat({w, w}),
                                     w.data(),
                                     w * torch::ones_like(w)};
    for (size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(i);
      expect_refused(error_of<UsageError>([&] { F::linear(input(), all[i]); }), "aten::mm",
                     "fc.weight");
    }
    EXPECT_TRUE(F::linear(input(), w.new_zeros({5, kIn})).eq(0).all().item<bool>());
  });
}

TEST(PartsOutsideSteps, AutocastCastsParts) {
  after_a_step<Layer>(input(), [](Layer& net, auto&) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const std::string text = error_of<UsageError>([&] { net.forward(input().to(torch::kFloat)); });
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    expect_has(text, {"needs all of parameter \"fc.bias\""});
  });
}

/// The rank's part of a tensor divided along dimension 0.
Tensor part_of(const Tensor& whole) { return whole.chunk(2)[tp_rank()]; }

TEST(PartsOutsideSteps, CodeOverElementsIsThatOfOneProcess) {
  after_a_step<Layer>(input(), [](Layer& net, auto& model) {
    const torch::NoGradGuard no_grad;
    const Tensor w = net.fc->weight, b = net.fc->bias,
                 before = part_of(model->state_dict()["fc.weight"]);
    ASSERT_EQ(w.sizes(), before.sizes());
    EXPECT_TRUE(w.equal(before));
    Tensor average = w.detach().clone();
    average.mul_(0.5).add_(w, 0.5).lerp_(w, 0.25);
    const Tensor grad = torch::full_like(w, 2);
    w.sub_(0.5 * grad);
    w.add_(grad, -0.5).mul_(torch::full_like(w, 3)).addcdiv_(grad, grad, -1);
    EXPECT_TRUE(torch::allclose(w, (before - 2) * 3 - 1));
    EXPECT_TRUE(torch::allclose(average, before));
    w.copy_(before);
    w.data().sub_(1);
    EXPECT_TRUE(w.equal(before - 1));
    w.masked_fill_(before > 0, 7);
    EXPECT_TRUE(w.equal(torch::where(before > 0, torch::full_like(before, 7), before - 1)));
    w.clamp_(-1, 1);
    torch::_foreach_add_({w, b}, {before, torch::ones_like(b)});
    EXPECT_NEAR(w.norm().item<double>(), w.data().clone().pow(2).sum().sqrt().item<double>(),
                1e-12);
    EXPECT_EQ(torch::cat({w.flatten(), b.flatten(), torch::ones({3}, torch::kDouble)}).numel(),
              w.numel() + b.numel() + 3);
    torch::nn::utils::vector_to_parameters(torch::nn::utils::parameters_to_vector({w, b}) * 2,
                                           {w, b});
    w.zero_();
    EXPECT_TRUE(model->state_dict()["fc.weight"].eq(0).all().template item<bool>());
  });
}

TEST(PartsOutsideSteps, OperandsThatAreLargerThanThePartAreRefused) {
  after_a_step<Layer>(input(), [](Layer& net, auto&) {
    expect_refused(error_of<UsageError>([&] {
                     torch::ones({4, 1}, torch::kDouble) * net.fc->bias;
                   }),
                   "aten::mul", "fc.bias");
  });
}

/// A penalty on the weights adds to the gradients of parts, element by element.
TEST(PartsOutsideSteps, APenaltyDifferentiates) {
  after_a_step<Layer>(input(), [](Layer& net, auto& model) {
    const Tensor w = net.fc->weight, before = w.grad().clone();
    w.pow(2).sum().backward();
    EXPECT_TRUE(torch::allclose(w.grad(), before + 2 * w.detach()));
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.1);
    const Tensor expected = w.detach() - 0.1 * w.grad();
    optimizer.step();
    EXPECT_TRUE(torch::allclose(w, expected));
  });
}

/// Wholes are lent until the next call; copies are whole.
TEST(PartsOutsideSteps, WholesAreUsedAsEver) {
  after_a_step<Layer>(input(), [](Layer& net, auto& model) {
    namespace F = torch::nn::functional;
    const auto state = model->state_dict();
    const Tensor expected = F::linear(input(), state["fc.weight"], state["fc.bias"]);
    for (int time = 0; time < 2; ++time) {
      model->cpu();
      EXPECT_TRUE(torch::allclose(net.forward(input()), expected));
      EXPECT_TRUE(torch::allclose(model(input()), expected));
    }
    const auto local = model->local_state_dict();
    EXPECT_TRUE(local["fc.weight"].equal(part_of(state["fc.weight"])));
    expect_has(error_of<UsageError>([&] { net.forward(input()); }),
               {"needs all of parameter \"fc.bias\""});
    auto evaluate = step([&](Tensor a) { return net.forward(a); });
    EXPECT_TRUE(torch::allclose(evaluate(input()).concat(), expected));
    expect_has(error_of<UsageError>([&] { net.forward(input()); }),
               {"needs all of parameter \"fc.bias\""});
  });
}

struct Mlp : torch::nn::Module {
  Mlp() {
    up = register_module("up", torch::nn::Linear(kIn, 64));
    down = register_module("down", torch::nn::Linear(64, 1));
  }
  Tensor forward(Tensor x) { return down(torch::tanh(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};

TEST(PartsOutsideSteps, AnMlpOfTheRightShapeIsRefused) {
  after_a_step<Mlp>(input(), [](Mlp& net, auto& model) {
    ASSERT_TRUE(model->is_distributed_parameter(net.down->weight));
    expect_refused(error_of<UsageError>([&] { net.forward(input()); }), "aten::addmm", "up.bias");
  });
}

/// Parameters of other ranks of a pipeline stay absent.
TEST(PartsOutsideSteps, StagesHavePartsOrNothing) {
  after_a_step<Mlp>(input(),
                    [](Mlp& net, auto& model) {
                      const auto own = model->local_parameters();
                      for (auto& parameter : net.parameters()) {
                        const bool has =
                            std::any_of(own.begin(), own.end(),
                                        [&](const Tensor& one) { return one.is_same(parameter); });
                        if (parameter.dim() < 2) continue;
                        const auto text = error_of<UsageError>([&] {
                          torch::mm(parameter, torch::ones({parameter.size(1), 2}, torch::kDouble));
                        });
                        expect_has(text, {has ? "this rank has a part of these numbers"
                                              : "this rank does not have these numbers"});
                      }
                      model->cpu();
                      const auto state = model->state_dict();
                      expect_has(error_of<UsageError>([&] { net.forward(input()); }),
                                 {"needs all of parameter \"up.bias\""});
                    },
                    {2, 2, 1, true});
}

/// A table that is tied to the head.
struct Classifier : torch::nn::Module {
  Classifier() { tokens = register_module("tokens", torch::nn::Embedding(64, 16)); }
  Tensor forward(Tensor ids) { return torch::nn::functional::linear(tokens(ids), tokens->weight); }
  torch::nn::Embedding tokens{nullptr};
};

TEST(PartsOutsideSteps, ATableOfEmbeddingsIsRefused) {
  const Tensor ids = torch::arange(8).reshape({4, 2});
  after_a_step<Classifier>(ids, [&](Classifier& net, auto& model) {
    ASSERT_TRUE(model->is_distributed_parameter(net.tokens->weight));
    expect_refused(error_of<UsageError>([&] { net.tokens->forward(ids); }), "aten::embedding",
                   "tokens.weight");
  });
}

/// Layers of smp::nn communicate by themselves.
TEST(PartsOutsideSteps, ModulesThatDivideThemselvesAreCalled) {
  const auto batch = token_batch(0);
  run_as_threads(2, config_of({2}), [&] {
    const auto net = make_model<DividedModel>(5);
    ModelOf<DividedModel> model(net);
    step([&](Tensor x, Tensor y) { return net->loss(x, y); })(batch[0], batch[1]);
    const auto plain = make_model<PlainModel>(5);
    const torch::NoGradGuard no_grad;
    const auto state = model->state_dict();
    for (auto& item : plain->named_parameters()) item.value().copy_(state[item.key()]);
    net->eval();
    plain->eval();
    EXPECT_TRUE(torch::allclose(net->forward(batch[0]), plain->forward(batch[0])));
  });
}

}  // namespace
}  // namespace smp
