// SPDX-License-Identifier: Apache-2.0
// The code of docs/recipes.md, compiled and run: recipes_page_test checks that every block of that
// page is found here.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "smp/smp.h"

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    fc1 = register_module("fc1", torch::nn::Linear(8, 16));
    fc2 = register_module("fc2", torch::nn::Linear(16, 3));
  }
  torch::Tensor forward(torch::Tensor x) { return fc2(torch::relu(fc1(x))); }

  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

using Model = smp::DistributedModel<Net>;
using Optimizer = smp::DistributedOptimizer<torch::optim::SGD>;

/// On two stages; modules are made before, since ranks as threads share a generator.
void on_two_stages(const std::function<void(Net, Net)>& program) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  std::vector<Net> nets{Net(), Net()}, others{Net(), Net()};
  smp::run_as_threads(2, smp::Config().partitions(2).microbatches(2).seed(7),
                      [&] { program(nets[smp::rank()], others[smp::rank()]); });
}

auto make_training(Model& model) {
  return smp::step([&model](torch::Tensor x, torch::Tensor y) {
    auto loss = torch::cross_entropy_loss(model(x), y);
    model->backward(loss);
    return loss;
  });
}

torch::Tensor inputs() { return torch::linspace(-1, 1, 64).view({8, 8}); }
torch::Tensor targets() { return torch::arange(8) % 3; }

// docs/recipes.md, "Moving average of the weights"
struct Average {
  explicit Average(Model model) : model(model) {
    model->register_post_partition_hook([this] {
      for (const auto& parameter : this->model->parameters()) {
        weights.push_back(parameter.detach().clone());
      }
    });
  }

  void update(double decay) {
    torch::NoGradGuard no_grad;
    const auto parameters = model->parameters();
    for (size_t i = 0; i < weights.size(); ++i) {
      weights[i].mul_(decay).add_(parameters[i], 1 - decay);
    }
  }

  /// Puts the average into the model, and the model's weights here.
  void swap() {
    torch::NoGradGuard no_grad;
    auto parameters = model->parameters();
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto kept = parameters[i].detach().clone();
      parameters[i].copy_(weights[i]);
      weights[i].copy_(kept);
    }
  }

  Model model;
  std::vector<torch::Tensor> weights;
};

TEST(RecipesPage, MovingAverage) {
  on_two_stages([](Net net, Net) {
    Model model(net);
    Optimizer optimizer(model->parameters(), 0.1);
    const auto x = inputs(), y = targets();
    auto train = make_training(model);
    auto evaluate = smp::step([&](torch::Tensor x) { return model(x); });
    Average average(model);
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      train(x, y);
      optimizer.step();
      average.update(0.9);
    }
    const auto trained = model->state_dict();
    average.swap();
    const auto predictions = evaluate(x).concat();
    const auto weights = model->state_dict();
    average.swap();
    EXPECT_FALSE(torch::equal(weights["fc1.weight"], trained["fc1.weight"]));
    EXPECT_FALSE(torch::equal(weights["fc2.weight"], trained["fc2.weight"]));
    EXPECT_TRUE(torch::equal(model->state_dict()["fc1.weight"], trained["fc1.weight"]));
    EXPECT_TRUE(torch::equal(model->state_dict()["fc2.weight"], trained["fc2.weight"]));
  });
}

TEST(RecipesPage, TargetNetwork) {
  on_two_stages([](Net net, Net other) {
    Model online(net, smp::ModelOptions().name("online"));
    Model target(other, smp::ModelOptions().name("target"));
    Optimizer optimizer(online->parameters(), 0.1);
    auto train = smp::step([&](torch::Tensor x) {
      torch::Tensor wanted;
      {
        torch::NoGradGuard no_grad;
        wanted = target(x);
      }
      auto loss = torch::mse_loss(online(x), wanted);
      online->backward(loss);
      return loss;
    });
    train(inputs());
    optimizer.step();
    {
      // hard: the target becomes the online network
      target->load_state_dict(online->state_dict());
    }
    EXPECT_TRUE(torch::equal(target->state_dict()["fc2.bias"], online->state_dict()["fc2.bias"]));
    train(inputs());
    optimizer.step();
    const auto before = target->state_dict();
    {
      // soft: it follows slowly
      auto mixed = target->state_dict();
      const auto newest = online->state_dict();
      for (auto& item : mixed) item.value().lerp_(newest[item.key()], 0.005);
      target->load_state_dict(mixed);
    }
    EXPECT_TRUE(torch::equal(target->state_dict()["fc1.weight"],
                             before["fc1.weight"].lerp(online->state_dict()["fc1.weight"], 0.005)));
  });
}

TEST(RecipesPage, ClampingAndFreezing) {
  on_two_stages([](Net net, Net) {
    net->fc2->bias.set_requires_grad(false);  // before the first step or between steps
    Model model(net);
    Optimizer optimizer(model->parameters(), 10);
    const auto x = inputs(), y = targets();
    auto train = make_training(model);
    const auto before = model->state_dict()["fc2.bias"];
    train(x, y);
    optimizer.step();
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.clamp_(-0.01, 0.01);
    }
    EXPECT_LE(model->state_dict()["fc1.weight"].abs().max().item<float>(), 0.01f);
    EXPECT_LE(model->state_dict()["fc2.weight"].abs().max().item<float>(), 0.01f);
    EXPECT_TRUE(torch::equal(model->state_dict()["fc2.bias"], before.clamp(-0.01, 0.01)));
  });
}

TEST(RecipesPage, SharpnessAwareMinimisation) {
  on_two_stages([](Net net, Net) {
    Model model(net);
    Optimizer optimizer(model->parameters(), 0.1);
    const auto x = inputs(), y = targets();
    auto train = make_training(model);
    const double rho = 0.05;
    const auto before = model->state_dict()["fc1.weight"];
    optimizer.zero_grad();
    train(x, y);
    std::vector<torch::Tensor> climbed;
    {
      torch::NoGradGuard no_grad;
      const auto scale = rho / (smp::grad_norm(model) + 1e-12);
      for (auto& parameter : model->parameters()) {
        climbed.push_back(parameter.grad() * scale);
        parameter.add_(climbed.back());
      }
    }
    optimizer.zero_grad();
    train(x, y);
    {
      torch::NoGradGuard no_grad;
      auto parameters = model->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].sub_(climbed[i]);
    }
    optimizer.step();
    EXPECT_FALSE(torch::equal(model->state_dict()["fc1.weight"], before));
  });
}

TEST(RecipesPage, StepsThatAreSkipped) {
  on_two_stages([](Net net, Net) {
    Model model(net);
    Optimizer optimizer(model->parameters(), 0.1);
    const auto x = inputs(), y = targets();
    auto train = make_training(model);
    const double limit = 1e-6;
    const auto before = model->state_dict()["fc1.weight"];
    optimizer.zero_grad();
    train(x, y);
    if (smp::grad_norm(model).item<double>() < limit) optimizer.step();
    EXPECT_TRUE(torch::equal(model->state_dict()["fc1.weight"], before));
  });
}

// docs/recipes.md, "Tied weights"
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    token = register_module("token", torch::nn::Embedding(11, 8));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
  }
  torch::Tensor forward(torch::Tensor x) { return torch::linear(norm(token(x)), token->weight); }

  torch::nn::Embedding token{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Tied);

TEST(RecipesPage, TiedWeights) {
  torch::manual_seed(1);
  std::vector<Tied> nets{Tied(), Tied()};
  smp::run_as_threads(2, smp::Config().partitions(2).microbatches(2).seed(7), [&] {
    smp::DistributedModel<Tied> model(nets[smp::rank()]);
    Optimizer optimizer(model->parameters(), 0.1);
    auto train = smp::step([&](torch::Tensor x) {
      auto loss = torch::cross_entropy_loss(model(x).flatten(0, 1), x.flatten());
      model->backward(loss);
      return loss;
    });
    const auto x = torch::arange(8).view({4, 2});
    const double first = train(x).reduce_mean().item<double>();
    optimizer.step();
    EXPECT_LT(train(x).reduce_mean().item<double>(), first);
    EXPECT_EQ(model->state_dict().size(), 3u);
  });
}

}  // namespace
