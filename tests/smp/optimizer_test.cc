// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "graph/absent.h"
#include "smp/optim/fused.h"
#include "smp/optim/lamb.h"
#include "smp/optim/novograd.h"
#include "tests/smp/sharded_state.h"

// DistributedOptimizer over stages and replicas, against the same program in plain libtorch.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

const auto kLambStep = recipe<optim::Lamb>(optim::LambOptions(0.02).max_grad_norm(0.05), true);
const auto kNovoGrad =
    recipe<optim::NovoGrad>(optim::NovoGradOptions(0.02).weight_decay(0.01), true);
const auto kFusedAdamW =
    recipe<optim::FusedAdamW>(to::AdamWOptions(0.01).amsgrad(true).weight_decay(0.1), true);
const auto kFusedAdam = recipe<optim::FusedAdam>(to::AdamOptions(0.01).weight_decay(0.1), true);
const auto kFusedSgd = recipe<optim::FusedSGD>(to::SGDOptions(0.1).momentum(0.9), true);
const auto kFusedAdagrad = recipe<optim::FusedAdagrad>(
    to::AdagradOptions(0.05).lr_decay(0.01).initial_accumulator_value(0.1), true);

const std::vector<Training> kWhole{{1, 1, false}, {2, 1, false}, {3, 1, false}, {2, 2, false}};
const std::vector<Training> kPieces{{1, 2, true}, {1, 3, true}, {2, 2, true}};

/// The norm that LAMB clips by is that over all ranks.
TEST(Optimizers, LambOverStages) { expect_as_plain(kLambStep, kWhole); }
TEST(Optimizers, NovoGradOverStages) { expect_as_plain(kNovoGrad, kWhole); }
TEST(Optimizers, FusedOverStages) { expect_as_plain(kFusedAdamW, kWhole); }
/// Norms of parameters, gradients and updates are those of whole ones.
TEST(Optimizers, LambOnPieces) { expect_as_plain(kLambStep, kPieces); }
TEST(Optimizers, NovoGradOnPieces) {
  expect_as_plain(kNovoGrad, kPieces);
  auto largest = kNovoGrad;
  largest.options.norm_type(0);
  expect_as_plain(largest, {kPieces.back()});
}
TEST(Optimizers, FusedOnPieces) {
  expect_as_plain(kFusedAdamW, kPieces);
  expect_as_plain(kFusedAdam, kPieces);
  expect_as_plain(kFusedSgd, kPieces);
  expect_as_plain(kFusedAdagrad, kPieces);
}

/// Which class a program's optimizer is.
struct Plain {
  template <class Base>
  using Optimizer = Base;
};
struct Ranks {
  template <class Base>
  using Optimizer = DistributedOptimizer<Base>;
};

/// Trains in step i on a batch of its own, and returns the mean loss.
using Train = std::function<torch::Tensor(int)>;

/// `program(Plain() or Ranks(), parameters, train)` ends with the same weights in one plain process
/// and on one to three stages.
template <class Program>
void expect_same_program(const Program& program) {
  torch::set_num_threads(1);
  const auto plain = make_mlp();
  const auto parameters = unique_parameters(*plain);
  program(Plain(), parameters, Train([&](int i) {
            const auto x = mlp_input(i);
            const auto losses = plain_backward(parameters, 1, 2, [&](int m) {
              return Mlp(plain)->forward(part(x, 2, m)).square().mean();
            });
            return (losses[0] + losses[1]) / 2;
          }));
  for (const int count : {1, 2, 3}) {
    SCOPED_TRACE(c10::str(count, " stages"));
    std::vector<Mlp> nets;
    for (int i = 0; i < count; ++i) nets.push_back(make_mlp());
    std::vector<torch::Tensor> inputs;
    for (int i = 0; i < 8; ++i) inputs.push_back(mlp_input(i));
    run_as_threads(count, stages(count), [&] {
      DistributedModel<Mlp> model(nets[rank()]);
      auto train = step([&](torch::Tensor x) {
        auto loss = model(x).square().mean();
        model->backward(loss);
        return loss;
      });
      program(Ranks(), model->parameters(),
              Train([&](int i) { return train(inputs[i].clone()).reduce_mean(); }));
      expect_equal(to_map(model->state_dict()), state_of(*plain), "value");
    });
  }
}

template <class Tag, class Base>
using Of = typename Tag::template Optimizer<Base>;

TEST(DistributedOptimizer, GroupsWithOptionsOfTheirOwn) {
  expect_same_program([](auto tag, const Tensors& all, const Train& train) {
    std::vector<to::OptimizerParamGroup> groups;
    groups.emplace_back(Tensors(all.begin(), all.begin() + 3));
    groups.emplace_back(Tensors(all.begin() + 3, all.end() - 2),
                        std::make_unique<to::AdamWOptions>(to::AdamWOptions(0.3).weight_decay(1)));
    Of<decltype(tag), to::AdamW> optimizer(groups, to::AdamWOptions(0.05));
    for (int i = 0; i < 4; ++i) {
      optimizer.zero_grad();
      train(i);
      optimizer.step();
      if (i != 1) continue;  // later, a third group
      optimizer.add_param_group(to::OptimizerParamGroup(Tensors(all.end() - 2, all.end()),
                                                        std::make_unique<to::AdamWOptions>(0.2)));
    }
    EXPECT_EQ(optimizer.param_groups().size(), 3u);
  });
}

TEST(DistributedOptimizer, Schedulers) {
  expect_same_program([](auto tag, const Tensors& all, const Train& train) {
    Of<decltype(tag), to::SGD> optimizer(all, to::SGDOptions(0.2).momentum(0.5));
    to::StepLR before(optimizer, 2, 0.5);
    std::unique_ptr<to::ReduceLROnPlateauScheduler> after;
    for (int i = 0; i < 8; ++i) {
      optimizer.zero_grad();
      const auto loss = train(i);
      optimizer.step();
      before.step();
      if (i == 2) {
        after = std::make_unique<to::ReduceLROnPlateauScheduler>(
            optimizer, to::ReduceLROnPlateauScheduler::min, 0.3f, /*patience=*/0,
            /*threshold=*/0.5);
      }
      if (after) after->step(loss.item<float>());
    }
    EXPECT_LT(optimizer.param_groups()[0].options().get_lr(), 0.2 / 16);
  });
}

TEST(DistributedOptimizer, ClosuresAndBothWaysToZeroGradients) {
  for (const bool set_to_none : {true, false}) {
    expect_same_program([&](auto tag, const Tensors& all, const Train& train) {
      Of<decltype(tag), to::Adam> optimizer(all, to::AdamOptions(0.1));
      for (int i = 0; i < 4; ++i) {
        const auto loss = optimizer.step([&] {
          optimizer.zero_grad(set_to_none);
          return train(i);
        });
        EXPECT_TRUE(loss.defined());
      }
      optimizer.zero_grad(set_to_none);
      for (const auto& parameter : all) {
        EXPECT_TRUE(!parameter.grad().defined() || !set_to_none);
        const bool is_here = parameter.grad().defined() && !graph::is_absent(parameter.grad());
        if (is_here) {
          EXPECT_EQ(parameter.grad().abs().max().item<float>(), 0);
        }
      }
    });
  }
}

/// `zero_grad` of the base hides behind that of the class; gradients that it drops are dropped.
TEST(DistributedOptimizer, GradientsDroppedThroughTheBase) {
  for (const bool set_to_none : {true, false}) {
    expect_same_program([&](auto tag, const Tensors& all, const Train& train) {
      Of<decltype(tag), to::SGD> optimizer(all, to::SGDOptions(0.1).momentum(0.9));
      for (int i = 0; i < 4; ++i) {
        static_cast<to::Optimizer&>(optimizer).zero_grad(set_to_none);
        train(i);
        optimizer.step();
      }
    });
  }
}

/// The library refers to a running optimizer, so it stays where it is.
using Distributed = DistributedOptimizer<to::AdamW>;
static_assert(!std::is_copy_constructible_v<Distributed>);
static_assert(!std::is_move_constructible_v<Distributed>);
static_assert(!std::is_copy_assignable_v<Distributed>);
static_assert(!std::is_move_assignable_v<Distributed>);
static_assert(!std::is_copy_constructible_v<OptimizerCore>, "would outlive its optimizer");

TEST(DistributedOptimizer, IsMadeWhereItStays) {
  expect_same_program([](auto tag, const Tensors& all, const Train& train) {
    // Returned from a function without a move.
    auto optimizer = [&] { return Of<decltype(tag), to::AdamW>(all, to::AdamWOptions(0.05)); }();
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      train(i);
      optimizer.step();
    }
  });
}

TEST(DistributedOptimizer, SeveralOverPartsOfAModel) {
  expect_same_program([](auto tag, const Tensors& all, const Train& train) {
    Of<decltype(tag), to::Adam> first(Tensors(all.begin(), all.begin() + 5), to::AdamOptions(0.1));
    Of<decltype(tag), optim::Lamb> second(Tensors(all.begin() + 5, all.end()),
                                          optim::LambOptions(0.1).max_grad_norm(0.01));
    for (int i = 0; i < 4; ++i) {
      first.zero_grad();
      second.zero_grad();
      train(i);
      first.step();
      if (i % 2 == 1) second.step();
    }
  });
}

/// Its rank would clip by the norm of its own gradients.
TEST(DistributedOptimizer, IsNeededByAnOptimizerThatClips) {
  const std::vector<Mlp> nets{make_mlp(), make_mlp()};
  const auto input = mlp_input(0);
  const std::string text = error_of_run<UsageError>(2, Config().partitions(2).microbatches(1), [&] {
    DistributedModel<Mlp> model(nets[rank()]);
    optim::Lamb lamb(model->parameters(), optim::LambOptions(0.1).max_grad_norm(1));
    auto train = step([&](torch::Tensor x) { model->backward(model(x).square().mean()); });
    train(input);
    lamb.step();
  });
  expect_has(text, {"needs the norm of all gradients, and this rank has those of some parameters",
                    "smp::distributed(optimizer)"});
}

/// Before the module is wrapped, long before it is partitioned.
TEST(DistributedOptimizer, MadeFromThePlainModule) {
  torch::set_num_threads(1);
  const auto plain = make_mlp();
  const auto parameters = unique_parameters(*plain);
  to::Adam optimizer(parameters, to::AdamOptions(0.1));
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    plain_backward(parameters, 1, 2, [&](int m) {
      return Mlp(plain)->forward(part(mlp_input(i), 2, m)).square().mean();
    });
    optimizer.step();
  }
  std::vector<Mlp> nets{make_mlp(), make_mlp()};
  std::vector<torch::Tensor> inputs{mlp_input(0), mlp_input(1), mlp_input(2)};
  run_as_threads(2, stages(2), [&] {
    to::Adam adam(nets[rank()]->parameters(), to::AdamOptions(0.1));
    DistributedModel<Mlp> model(nets[rank()]);
    auto own = distributed(adam);
    auto train = step([&](torch::Tensor x) {
      auto loss = model(x).square().mean();
      model->backward(loss);
      return loss;
    });
    for (const auto& x : inputs) {
      own.zero_grad();
      train(x.clone());
      own.step();
    }
    expect_equal(to_map(model->state_dict()), state_of(*plain), "value");
  });
}

}  // namespace
}  // namespace smp
