// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "smp/optim/adadelta.h"
#include "smp/optim/uses_tensor_norms.h"
#include "tests/smp/sharded_state.h"

// Programs with optimizers under `shard_optimizer_state`: the same as without, or an error.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

TEST(ShardedOptimizer, GradientsAddUpAndAreCleared) {
  using Clear = std::function<void(DistributedModel<Mlp>&, DistributedOptimizer<to::SGD>&)>;
  const std::vector<Clear> ways{
      [](auto&, auto&) {},
      [](auto&, auto& optimizer) { optimizer.zero_grad(); },
      [](auto&, auto& optimizer) { optimizer.zero_grad(false); },
      [](auto& model, auto&) { model->zero_grad(); },
      [](auto& model, auto&) { model.get_module()->zero_grad(); },
      [](auto&, auto& optimizer) { static_cast<to::Optimizer&>(optimizer).zero_grad(); },
  };
  for (const auto& clear : ways) {
    expect_same_with_and_without([&](DistributedModel<Mlp>& model, const auto& train) {
      DistributedOptimizer<to::SGD> optimizer(model->parameters(),
                                              to::SGDOptions(0.1).momentum(0.5));
      for (int i = 0; i < 4; ++i) {
        train();
        if (i % 2 == 0) continue;
        optimizer.step();
        clear(model, optimizer);
      }
    });
  }
}

TEST(ShardedOptimizer, ClosuresSeeTheParameters) {
  expect_same_with_and_without([](DistributedModel<Mlp>& model, const auto& train) {
    DistributedOptimizer<to::Adam> optimizer(model->parameters(), to::AdamOptions(0.1));
    for (int i = 0; i < 3; ++i) {
      const auto loss = optimizer.step([&] {
        EXPECT_TRUE(optimizer.param_groups()[0].params()[0].is_same(model->parameters()[0]));
        optimizer.zero_grad();
        return train();
      });
      EXPECT_TRUE(loss.defined());
    }
  });
}

/// Two optimizers, each over a part of the parameters, one of which is wrapped.
TEST(ShardedOptimizer, OptimizersOverParts) {
  expect_same_with_and_without([](DistributedModel<Mlp>& model, const auto& train) {
    const auto all = model->parameters();
    const Tensors first(all.begin(), all.begin() + 5), second(all.begin() + 7, all.end());
    DistributedOptimizer<to::Adam> adam(first, to::AdamOptions(0.1));
    optim::Adadelta adadelta(second);
    auto wrapped = distributed(adadelta);
    for (int i = 0; i < 3; ++i) {
      adam.zero_grad();
      wrapped.zero_grad();
      train();
      adam.step();
      wrapped.step();
    }
  });
}

TEST(ShardedOptimizer, HalfPrecision) {
  expect_same_with_and_without(
      [](DistributedModel<Mlp>& model, const auto& train) {
        DistributedOptimizer<to::AdamW> optimizer(model->parameters(), to::AdamWOptions(0.1));
        for (int i = 0; i < 3; ++i) {
          optimizer.zero_grad();
          train();
          optimizer.step();
        }
      },
      torch::kBFloat16);
}

TEST(ShardedOptimizer, GradientsCanBeClipped) {
  const auto train = [](bool sharded, bool clip) {
    return train_mlp(sharded, [&](DistributedModel<Mlp>& model, const auto& train) {
      DistributedOptimizer<to::SGD> optimizer(model->parameters(), to::SGDOptions(1));
      train();
      if (clip && sharded) clip_grad_norm_(model, 0.01);
      if (clip && !sharded) torch::nn::utils::clip_grad_norm_(model->local_parameters(), 0.01);
      optimizer.step();
    });
  };
  const auto clipped = train(true, true);
  expect_equal(clipped, train(false, true), "value");
  EXPECT_FALSE(torch::allclose(train(true, false).at("head.weight"), clipped.at("head.weight")));
}

/// Models that share a parameter.
TEST(ShardedOptimizer, SeveralModels) {
  std::map<bool, Named> weights;
  for (const bool sharded : {false, true}) {
    std::mutex mutex;
    std::vector<std::pair<Mlp, Mlp>> nets;
    for (int i = 0; i < 4; ++i) {
      torch::manual_seed(3);
      nets.emplace_back(Mlp(2), Mlp(2));
      nets.back().second->head->weight = nets.back().first->head->weight;
      nets.back().second->head->register_parameter("tied", nets.back().first->head->weight);
    }
    run_as_threads(4, stages(2).ddp(true).shard_optimizer_state(sharded), [&] {
      auto [one, two] = nets[rank()];
      DistributedModel<Mlp> a(one, ModelOptions().name("a"));
      DistributedModel<Mlp> b(two, ModelOptions().name("b"));
      DistributedOptimizer<to::Adam> adam(a->parameters(), to::AdamOptions(0.1));
      Tensors rest;
      for (const auto& parameter : b->parameters()) {
        if (!parameter.is_same(one->head->weight)) rest.push_back(parameter);
      }
      DistributedOptimizer<to::SGD> sgd(rest, to::SGDOptions(0.1).momentum(0.9));
      auto train = step([&](torch::Tensor x) {
        auto loss = a(x).square().mean() + b(x.cos()).square().mean();
        a->backward(loss);
        return loss;
      });
      for (int i = 0; i < 3; ++i) {
        adam.zero_grad();
        sgd.zero_grad();
        train(torch::full({8, MlpImpl::kWidth}, 0.1 * (i + dp_rank())));
        adam.step();
        sgd.step();
      }
      auto state = to_map(a->state_dict());
      for (const auto& [name, tensor] : to_map(b->state_dict())) state["b." + name] = tensor;
      const std::lock_guard lock(mutex);
      weights[sharded] = state;
    });
  }
  expect_equal(weights[true], weights[false], "value");
}

/// An update of each element by itself, which the library does not know.
struct SignSgd : to::Optimizer {
  SignSgd(Tensors parameters, to::SGDOptions options)
      : Optimizer(std::move(parameters), std::make_unique<to::SGDOptions>(options)) {}
  torch::Tensor step(LossClosure) override {
    torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) {
        if (parameter.grad().defined()) parameter.sub_(parameter.grad().sign() * 0.1);
      }
    }
    return {};
  }
};

/// One that takes the norm of a whole parameter by itself.
struct Lars : SignSgd {
  using SignSgd::SignSgd;
};

/// One that asks for it.
struct LarsOfWholes : SignSgd, optim::UsesTensorNorms {
  using SignSgd::SignSgd;
  torch::Tensor step(LossClosure) override {
    torch::NoGradGuard no_grad;
    std::vector<optim::TensorOfParameter> parameters, gradients;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        parameters.push_back({parameter, parameter});
        gradients.push_back({parameter, parameter.grad()});
      }
    }
    const auto sizes = tensor_norms_(parameters, 2), steps = tensor_norms_(gradients, 2);
    for (size_t i = 0; i < sizes.size(); ++i) {
      parameters[i].tensor.sub_(gradients[i].tensor, 0.1 * sizes[i] / steps[i]);
    }
    return {};
  }
};

}  // namespace
}  // namespace smp

template <>
struct smp::optim::IsElementwise<smp::SignSgd> : std::true_type {};

template <>
struct smp::optim::IsElementwise<smp::LarsOfWholes> : std::true_type {};

namespace smp {
namespace {

TEST(ShardedOptimizer, AnOptimizerOfYourOwn) {
  expect_same_with_and_without([](DistributedModel<Mlp>& model, const auto& train) {
    DistributedOptimizer<SignSgd> optimizer(model->parameters(), to::SGDOptions(0.1));
    train();
    optimizer.step();
  });
}

TEST(ShardedOptimizer, AnOptimizerOfYourOwnThatAsksForNorms) {
  expect_same_with_and_without([](DistributedModel<Mlp>& model, const auto& train) {
    DistributedOptimizer<LarsOfWholes> optimizer(model->parameters(), to::SGDOptions(0.1));
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      train();
      optimizer.step();
    }
  });
}

/// The error that ends a program on two sharded replicas.
std::string error_of_program(
    const std::function<void(DistributedModel<Mlp>&, const std::function<torch::Tensor()>&)>&
        loop) {
  return error_of<c10::Error>([&] { train_mlp(true, loop); });
}

TEST(ShardedOptimizerErrors, OptimizersThatNeedWholeParameters) {
  const auto unknown = error_of_program([](DistributedModel<Mlp>& model, const auto&) {
    DistributedOptimizer<Lars> optimizer(model->parameters(), to::SGDOptions(0.1));
  });
  expect_has(unknown, {"needs an optimizer that updates each element of a parameter by itself",
                       "smp::optim::IsElementwise<", "Lars> : std::true_type {}"});
  const auto refused = error_of_program([](DistributedModel<Mlp>& model, const auto&) {
    to::LBFGS lbfgs(model->parameters());
    static_cast<void>(distributed(static_cast<to::Optimizer&>(lbfgs)));
  });
  expect_has(refused, {"optimizer torch::optim::LBFGS needs whole parameters, and with"});
}

TEST(ShardedOptimizerErrors, GradientsWithoutNumbers) {
  // Reading them is an error, since the numbers are not there.
  const auto clipped = error_of_program([](DistributedModel<Mlp>& model, const auto& train) {
    train();
    torch::nn::utils::clip_grad_norm_(model->local_parameters(), 1.0);
  });
  expect_has(clipped, {"needs .grad of parameter \"", "\", which is in pieces on the replicas"});
  for (const bool scaled : {false, true}) {
    const auto changed = error_of_program([&](DistributedModel<Mlp>& model, const auto& train) {
      DistributedOptimizer<to::SGD> optimizer(model->parameters(), to::SGDOptions(0.1));
      train();
      auto& gradient = model->parameters()[0].mutable_grad();
      if (scaled) {
        gradient.mul_(0.5);
      } else {
        gradient = torch::ones_like(model->parameters()[0]);
      }
      optimizer.step();
    });
    if (scaled) {
      expect_has(changed,
                 {"operator aten::mul_ needs .grad of parameter \"in.weight\", which is in "
                  "pieces on the replicas: this rank does not have these numbers. With "
                  "\"shard_optimizer_state\" or \"sharded_data_parallel_degree\" read and "
                  "change the pieces of this rank: .grad of "
                  "model->virtual_named_parameters()"});
    } else {
      expect_has(changed,
                 {"the program has changed .grad of parameter \"in.weight\", which holds no",
                  "Change .grad of model->virtual_named_parameters() instead"});
    }
  }
  // A plain optimizer would have nothing to go by.
  const auto plain = error_of_program([](DistributedModel<Mlp>& model, const auto& train) {
    to::SGD optimizer(model->parameters(), to::SGDOptions(0.1));
    train();
    optimizer.step();
  });
  expect_has(plain, {"which is in pieces on the replicas"});
}

TEST(ShardedOptimizerErrors, ParametersFrozenLater) {
  const auto text = error_of_program([](DistributedModel<Mlp>& model, const auto& train) {
    train();
    model->parameters()[0].set_requires_grad(false);
    train();
  });
  expect_has(text, {"are divided among the replicas when the first step that trains begins",
                    "(12 then, 11 now)"});
}

}  // namespace
}  // namespace smp
