// SPDX-License-Identifier: Apache-2.0
// The code of docs/recipes.md, compiled and run: recipes_page_test checks that every block of that
// page is found here.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "smp/smp.h"
#include "tests/docs/two_stages.h"

namespace {

using smp::testing::inputs;
using smp::testing::make_training;
using smp::testing::Net;
using smp::testing::on_two_stages;
using smp::testing::targets;

using Model = smp::DistributedModel<Net>;
using Optimizer = smp::DistributedOptimizer<torch::optim::SGD>;

// docs/recipes.md, "Moving average of the weights (EMA)"
TEST(RecipesPage, MovingAverage) {
  on_two_stages([](Net net, Net) {
    Model model(net);
    Optimizer optimizer(model->parameters(), 0.1);
    const auto x = inputs(), y = targets();
    auto train = make_training(model);
    auto evaluate = smp::step([&](torch::Tensor x) { return model(x); });
    smp::Ema ema(model, optimizer, smp::EmaOptions().decay(0.9));
    torch::Tensor expected, predictions;
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      train(x, y);
      optimizer.step();
      ema.update();
      const auto weight = model->state_dict()["fc2.weight"].clone();
      expected = expected.defined() ? expected.lerp(weight, 1 - 0.9) : weight;
    }
    const auto trained = model->state_dict();
    auto weights = trained;
    {
      const auto averaged = ema.averaged();  // until this block ends
      predictions = evaluate(x).concat();
      weights = model->state_dict();
    }
    EXPECT_TRUE(torch::equal(weights["fc2.weight"], expected));
    EXPECT_FALSE(torch::equal(weights["fc1.weight"], trained["fc1.weight"]));
    EXPECT_FALSE(torch::equal(predictions, evaluate(x).concat()));
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

/// Gives a plain module the weights of a model that has been divided.
void take_weights(torch::nn::Module& plain, const smp::ModelCore& model) {
  torch::NoGradGuard no_grad;
  auto state = model.state_dict();
  for (auto& item : plain.named_parameters()) item.value().copy_(state[item.key()]);
}

void expect_close(const smp::ModelCore& model, const torch::nn::Module& plain) {
  auto state = model.state_dict();
  for (const auto& item : plain.named_parameters()) {
    EXPECT_TRUE(torch::allclose(state[item.key()], item.value(), 1e-5, 1e-6)) << item.key();
  }
}

torch::Tensor plain_loss(Net& plain, const torch::Tensor& x, const torch::Tensor& y) {
  return torch::cross_entropy_loss(plain(x), y);
}

TEST(RecipesPage, ValidationAndEarlyStopping) {
  on_two_stages([](Net net, Net plain) {
    Model model(net);
    Optimizer optimizer(model->parameters(), 0.1);
    const std::string folder = ::testing::TempDir() + "/smp_recipes_best";
    const auto x = inputs(), y = targets();
    const std::vector<std::pair<torch::Tensor, torch::Tensor>> held_out{{x, y},
                                                                        {x.flip(0), y.flip(0)}};
    auto train = make_training(model);
    auto evaluate = smp::step(
        [&](torch::Tensor x, torch::Tensor y) { return torch::cross_entropy_loss(model(x), y); });
    const auto validate = [&] {
      model->eval();
      double sum = 0;
      for (const auto& [x, y] : held_out) {
        const auto losses = evaluate(smp::shard(x), smp::shard(y));
        sum += losses.reduce_mean(smp::CommGroup::kDp).item<double>();
      }
      model->train();
      return sum / static_cast<double>(held_out.size());
    };
    std::vector<double> seen;
    // Each epoch goes uphill, so the first is the best.
    const auto train_an_epoch = [&] {
      optimizer.zero_grad();
      train(x, y);
      for (auto& group : optimizer.param_groups()) group.options().set_lr(-0.1);
      optimizer.step();
      seen.push_back(validate());
    };
    const int64_t epochs = 10, patience = 2;
    double best = std::numeric_limits<double>::infinity();
    for (int64_t epoch = 0, worse = 0; epoch < epochs && worse < patience; ++epoch) {
      train_an_epoch();
      const double loss = validate();
      worse = loss < best ? 0 : worse + 1;
      if (worse == 0) smp::save_checkpoint(folder, "best", model, optimizer);
      best = std::min(best, loss);
    }
    ASSERT_EQ(seen.size(), 3u);
    EXPECT_EQ(best, seen[0]);
    EXPECT_LT(seen[0], seen[1]);
    take_weights(*plain, model);
    EXPECT_NEAR(seen[2], plain_loss(plain, x, y).item<double>(), 1e-5);
    smp::resume_from_checkpoint(folder, "best", model, optimizer);
    EXPECT_EQ(validate(), best);
  });
}

TEST(RecipesPage, GradientAccumulation) {
  on_two_stages([](Net net, Net plain) {
    const int64_t passes = 2;
    int64_t done = 0;
    const auto x = inputs(), y = targets();
    const std::vector<std::pair<torch::Tensor, torch::Tensor>> batches{{x, y}, {-x, y}};
    Model model(net, smp::ModelOptions().backward_passes_per_step(passes));
    Optimizer optimizer(model->parameters(), 0.1);
    auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = torch::cross_entropy_loss(model(x), y);
      model->backward(loss / passes);
      return loss;
    });
    smp::step([&](torch::Tensor x) { return model(x); })(x);
    take_weights(*plain, model);
    for (const auto& [x, y] : batches) {
      train(x, y);
      if (++done % passes != 0) continue;
      optimizer.step();
      optimizer.zero_grad();
    }
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
    ((plain_loss(plain, x, y) + plain_loss(plain, -x, y)) / 2).backward();
    plain_optimizer.step();
    expect_close(model, *plain);
  });
}

TEST(RecipesPage, Gans) {
  using Generator = smp::DistributedModel<torch::nn::Linear>;
  const std::string folder = ::testing::TempDir() + "/smp_recipes_gan";
  std::filesystem::remove_all(folder);
  on_two_stages([&](Net judge, Net plain_judge) {
    torch::nn::Linear maker(4, 8), plain_maker(4, 8);
    const auto real = inputs(), noise = torch::linspace(-1, 1, 32).view({8, 4});
    Generator generator(maker, smp::ModelOptions().name("generator"));
    Model critic(judge, smp::ModelOptions().name("critic"));
    Optimizer generator_optimizer(generator->parameters(), 0.1);
    Optimizer critic_optimizer(critic->parameters(), 0.1);
    auto train_critic = smp::step([&](torch::Tensor real, torch::Tensor noise) {
      auto loss = torch::softplus(-critic(real)).mean() +
                  torch::softplus(critic(generator(noise).detach())).mean();
      critic->backward(loss);
      return loss;
    });
    auto train_generator = smp::step([&](torch::Tensor noise) {
      auto loss = torch::softplus(-critic(generator(noise))).mean();
      generator->backward(loss);
      return loss;
    });
    const auto gan =
        smp::CheckpointParts().add(generator, generator_optimizer).add(critic, critic_optimizer);
    const auto run =
        smp::resume_from_checkpoint(folder, std::nullopt, gan, smp::LoadOptions().begin_anew(true));
    EXPECT_FALSE(run.found);
    smp::step([&](torch::Tensor x) { return critic(generator(x)); })(noise);
    take_weights(*plain_maker, generator);
    take_weights(*plain_judge, critic);
    {
      critic_optimizer.zero_grad();
      train_critic(real, noise);
      critic_optimizer.step();
      generator_optimizer.zero_grad();
      train_generator(noise);
      generator_optimizer.step();
    }
    torch::optim::SGD of_maker(plain_maker->parameters(), 0.1);
    torch::optim::SGD of_judge(plain_judge->parameters(), 0.1);
    (torch::softplus(-plain_judge(real)).mean() +
     torch::softplus(plain_judge(plain_maker(noise).detach())).mean())
        .backward();
    of_judge.step();
    torch::softplus(-plain_judge(plain_maker(noise))).mean().backward();
    of_maker.step();
    expect_close(generator, *plain_maker);
    expect_close(critic, *plain_judge);
    const int64_t step = run.step + 2;
    smp::save_checkpoint(folder, "step_" + std::to_string(step), gan);
    EXPECT_EQ(smp::resume_from_checkpoint(folder, std::nullopt, gan).step, step);
  });
}

TEST(RecipesPage, FineTuning) {
  const std::string folder = ::testing::TempDir() + "/smp_recipes_trained";
  torch::OrderedDict<std::string, torch::Tensor> saved;
  on_two_stages([&](Net net, Net) {
    Model model(net);
    smp::step([&](torch::Tensor x) { return model(x); })(inputs());
    smp::save(folder, model);
    const auto state = model->state_dict();
    if (smp::rank() == 0) saved = state;
  });
  on_two_stages([&](Net net, Net) {
    smp::load_into_module(folder, *net);
    for (auto& parameter : net->fc1->parameters()) parameter.set_requires_grad(false);
    Model model(net);
    Optimizer optimizer(net->fc2->parameters(), 0.1);
    make_training(model)(inputs(), targets());
    optimizer.step();
    auto state = model->state_dict();
    EXPECT_TRUE(torch::equal(state["fc1.weight"], saved["fc1.weight"]));
    EXPECT_FALSE(torch::equal(state["fc2.weight"], saved["fc2.weight"]));
  });
}

}  // namespace
