// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/absent.h"
#include "tests/failure/patience.h"
#include "tests/smp/oracle.h"

// Programs' use of gradients around their steps: gradients that ranks scale by other numbers,
// optimizers that step without gradients, replicas that leave out steps.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

constexpr int kWatchedSteps = 4;
const to::SGDOptions kOptions = to::SGDOptions(0.1).momentum(0.9);

/// A program's changes of the gradients of its parameters before `optimizer.step()` number `step`.
using WatchedBetween = std::function<void(const Tensors& parameters, int step)>;

struct WatchedRank {
  DistributedModel<Mlp>& model;
  Mlp net;
  DistributedOptimizer<to::SGD>& optimizer;
  std::function<torch::Tensor(int)> train;
  std::function<torch::Tensor(int)> evaluate;
};

/// Plays a program on ranks as threads; replicas get parts of a batch.
void on_ranks(int ranks, const Config& config, const std::function<void(WatchedRank&)>& body) {
  torch::set_num_threads(1);
  std::vector<Mlp> nets;
  for (int i = 0; i < ranks; ++i) nets.push_back(make_mlp());
  std::vector<torch::Tensor> inputs;
  for (int i = 0; i < kWatchedSteps; ++i) inputs.push_back(mlp_input(i));
  run_as_threads(ranks, config, [&] {
    DistributedModel<Mlp> model(nets[rank()]);
    DistributedOptimizer<to::SGD> optimizer(model->parameters(), kOptions);
    auto train = step(
        [&](torch::Tensor x) {
          auto loss = model(x).square().mean();
          model->backward(loss);
          return loss;
        },
        StepOptions().name("train"));
    auto evaluate = step([&](torch::Tensor x) { return model(x).square().mean(); },
                         StepOptions().name("evaluate"));
    WatchedRank rank_run{model, nets[rank()], optimizer,
                         [&](int i) { return train(inputs[i].clone()).reduce_mean(); },
                         [&](int i) { return evaluate(inputs[i].clone()).reduce_mean(); }};
    body(rank_run);
  });
}

/// Two stages, which own the same parameters in every run: no times are measured.
Config steady_stages() { return stages(2).trace_execution_times(false); }

/// Trains with `between` on two stages.
Named train_with(const WatchedBetween& between, bool evaluates = false,
                 const std::string& save_at = "") {
  Named weights;
  on_ranks(2, steady_stages(), [&](WatchedRank& here) {
    for (int i = 0; i < kWatchedSteps; ++i) {
      here.optimizer.zero_grad();
      here.train(i);
      between(here.net->parameters(), i);
      here.optimizer.step();
      if (evaluates) here.evaluate(i);
      if (!save_at.empty()) save(save_at, here.model, here.optimizer);
    }
    const auto state = to_map(here.model->state_dict());
    if (rank() == 0) weights = state;
  });
  return weights;
}

Named train_plain(const WatchedBetween& between) {
  auto net = make_mlp();
  const auto parameters = unique_parameters(*net);
  to::SGD optimizer(parameters, kOptions);
  for (int i = 0; i < kWatchedSteps; ++i) {
    optimizer.zero_grad();
    const auto x = mlp_input(i);
    plain_backward(parameters, 1, 2, [&](int m) { return net(part(x, 2, m)).square().mean(); });
    between(parameters, i);
    optimizer.step();
  }
  return state_of(*net);
}

/// Those whose gradients this rank has.
Tensors own(const Tensors& parameters) {
  Tensors result;
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.grad();
    if (gradient.defined() && !graph::is_absent(gradient)) result.push_back(parameter);
  }
  return result;
}

/// A rank's own norm, of all gradients that it has.
WatchedBetween clip_to(double max_norm) {
  return [=](const Tensors& parameters, int) {
    torch::nn::utils::clip_grad_norm_(own(parameters), max_norm);
  };
}

const std::initializer_list<std::string> kClipped = {
    "the program has multiplied the gradients of pp rank 0 by ", "and those of pp rank 1 by ",
    "between the step that made them and optimizer.step(). torch::nn::utils::clip_grad_norm_ does "
    "so: on each rank it takes the norm of this rank's gradients alone. Call "
    "smp::clip_grad_norm_(model, max_norm), which takes the norm over all ranks, and go on from a "
    "checkpoint: the optimizer has stepped"};

TEST(ClippingOnEachRank, IsRefusedAtTheNextStep) {
  int begun = 0;
  const auto text = error_of<UsageError>([&] {
    train_with([&](const Tensors& parameters, int i) {
      begun = i + 1;
      torch::nn::utils::clip_grad_norm_(own(parameters), 1e-3);  // less than either norm
    });
  });
  expect_has(text, kClipped);
  EXPECT_EQ(begun, 1);  // the second step did not begin
}

/// Only one of the ranks is above the bound: its factor changes from step to step.
TEST(ClippingOnEachRank, IsRefusedWhereOneRankAloneClips) {
  std::vector<double> norms(2);
  on_ranks(2, steady_stages(), [&](WatchedRank& here) {
    here.train(0);
    norms[rank()] = torch::nn::utils::clip_grad_norm_(own(here.net->parameters()), 1e9);
  });
  const auto [least, most] = std::minmax(norms[0], norms[1]);
  ASSERT_LT(least, most / 2);
  const double bound = most / 2;
  expect_has(error_of<UsageError>([&] { train_with(clip_to(bound)); }), kClipped);
}

/// Evaluations and saves look, too: nothing is used that was made so.
TEST(ClippingOnEachRank, IsRefusedByEvaluationsAndSaves) {
  const auto once = [](const Tensors& parameters, int i) {
    if (i == kWatchedSteps - 1) torch::nn::utils::clip_grad_norm_(own(parameters), 1e-3);
  };
  EXPECT_FALSE(train_with(once).empty());  // no later call asks
  expect_has(error_of<UsageError>([&] { train_with(once, /*evaluates=*/true); }), kClipped);
  const std::string path = ::testing::TempDir() + "/clipped";
  expect_has(error_of<UsageError>([&] { train_with(once, false, path); }),
             {"the program has multiplied the gradients of mp rank 0 by ",
              "Call smp::clip_grad_norm_(model, max_norm)"});
  std::filesystem::remove_all(path);
}

/// Changes that all ranks make alike, or to some of their gradients, are the program's own affair.
TEST(ScalingOnEachRank, IsTheProgramsAffair) {
  const std::vector<WatchedBetween> programs = {
      [](const Tensors& parameters, int) {  // all by one number
        for (const auto& parameter : parameters) {
          if (parameter.grad().defined()) parameter.grad().data().mul_(0.3);
        }
      },
      [](const Tensors& parameters, int i) {  // another one at every step
        for (const auto& parameter : parameters) {
          if (parameter.grad().defined()) parameter.mutable_grad().div_(i + 2);
        }
      },
      [](const Tensors& parameters, int) {  // one layer's
        for (size_t i = 0; i < 2; ++i) {
          if (parameters[i].grad().defined()) parameters[i].mutable_grad().mul_(0.1);
        }
      },
      [](const Tensors& parameters, int) {  // elements
        torch::nn::utils::clip_grad_value_(parameters, 1e-3);
      },
      [](const Tensors& parameters, int) {  // each by its own norm
        for (const auto& parameter : own(parameters)) {
          torch::nn::utils::clip_grad_norm_(std::vector<torch::Tensor>{parameter}, 1e-3);
        }
      },
      [](const Tensors& parameters, int) {  // none
        for (const auto& parameter : parameters) {
          if (parameter.grad().defined()) parameter.mutable_grad().zero_();
        }
      },
      clip_to(1e9)};
  for (size_t i = 0; i < programs.size(); ++i) {
    SCOPED_TRACE(i);
    expect_equal(train_with(programs[i]), train_plain(programs[i]), "value");
  }
}

/// All that one rank has, by a number that stays: right, and worth a word.
TEST(ScalingOnEachRank, OfOneStageIsWarnedOf) {
  std::vector<bool> is_mine(12);  // the parameters that stage 0 owns
  on_ranks(2, steady_stages(), [&](WatchedRank& here) {
    here.train(0);
    if (rank() > 0) return;
    const auto parameters = here.net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) is_mine[i] = !graph::is_absent(parameters[i]);
  });
  const WatchedBetween program = [&](const Tensors& parameters, int) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (is_mine[i] && parameters[i].grad().defined()) parameters[i].mutable_grad().mul_(0.25);
    }
  };
  ::testing::internal::CaptureStderr();
  const auto weights = train_with(program, /*evaluates=*/true);
  const auto log = ::testing::internal::GetCapturedStderr();
  expect_equal(weights, train_plain(program), "value");
  expect_has(log, {"warning: the program has multiplied the gradients of pp rank 0 by 0.25 and "
                   "those of pp rank 1 by 1 between"});
  const auto first = log.find("the program has multiplied");
  EXPECT_EQ(log.find("the program has multiplied", first + 1), std::string::npos);
}

/// The library's own way, also for the parameters of one stage alone.
TEST(ScalingOnEachRank, ByTheLibraryIsKnown) {
  std::vector<int> of_first;
  on_ranks(2, steady_stages(), [&](WatchedRank& here) {
    here.train(0);
    const auto parameters = here.net->parameters();
    for (size_t i = 0; rank() == 0 && i < parameters.size(); ++i) {
      if (!graph::is_absent(parameters[i])) of_first.push_back(static_cast<int>(i));
    }
  });
  const auto clip = [&](const Tensors& parameters, const auto& clip_norm) {
    Tensors some;
    for (int i : of_first) some.push_back(parameters[i]);
    clip_norm(some, 1e-3);
    clip_norm(parameters, 1e-3);
  };
  const auto got = train_with([&](const Tensors& parameters, int) {
    clip(parameters, [](const Tensors& list, double norm) { clip_grad_norm_(list, norm); });
  });
  const auto expected = train_plain([&](const Tensors& parameters, int) {
    clip(parameters,
         [](const Tensors& list, double norm) { torch::nn::utils::clip_grad_norm_(list, norm); });
  });
  expect_equal(got, expected, "value");
}

TEST(StepsWithoutBackward, AreRefusedWhereNoneTrains) {
  const auto text = error_of<UsageError>([&] {
    on_ranks(2, steady_stages(), [&](WatchedRank& here) {
      for (int i = 0; i < kWatchedSteps; ++i) {
        here.optimizer.zero_grad();
        here.evaluate(i);
        here.optimizer.step();
      }
    });
  });
  expect_has(text, {"optimizer.step() was called, and no step function has trained so far: "
                    "\"evaluate\" calls no model->backward, so it was an evaluation and made no "
                    "gradients. Call model->backward(loss) in it"});
}

TEST(StepsWithoutBackward, AreRefusedBeforeAnyStepFunction) {
  const auto text = error_of<UsageError>(
      [&] { on_ranks(2, steady_stages(), [&](WatchedRank& here) { here.optimizer.step(); }); });
  expect_has(text, {"optimizer.step() was called before any step function, so there are no "
                    "gradients. First call a step function that calls model->backward(loss)"});
}

TEST(StepsWithoutBackward, AreWarnedOfWhereOthersTrain) {
  const auto log_of = [](const std::function<void(WatchedRank&)>& body) {
    ::testing::internal::CaptureStderr();
    on_ranks(1, stages(1), body);
    return ::testing::internal::GetCapturedStderr();
  };
  const char* const warning =
      "warning: optimizer.step() was called, and no step function has trained since it was called "
      "before: \"evaluate\" called no model->backward this time";
  for (const bool set_to_none : {true, false}) {
    const auto log = log_of([&](WatchedRank& here) {
      for (int i = 0; i < kWatchedSteps; ++i) {
        here.optimizer.zero_grad(set_to_none);
        i == 0 ? here.train(i) : here.evaluate(i);
        here.optimizer.step();
      }
    });
    expect_has(log, {warning});
    EXPECT_EQ(log.find(warning, log.find(warning) + 1), std::string::npos);  // once
  }
  const auto silent = log_of([&](WatchedRank& here) {
    for (int i = 0; i < kWatchedSteps; ++i) {
      here.evaluate(i);
      here.optimizer.zero_grad();
      here.train(i);
      here.evaluate(i);
      here.optimizer.step();
      here.evaluate(i);
    }
    here.optimizer.step();  // once more with the old gradients
  });
  EXPECT_EQ(silent.find(warning), std::string::npos) << silent;
}

/// Whole parameters of full precision are any optimizer's; half ones are not.
TEST(PlainOptimizers, TrainWholeParametersAlone) {
  torch::set_num_threads(1);
  std::vector<Mlp> nets{make_mlp(), make_mlp()};
  std::vector<torch::Tensor> inputs;
  for (int i = 0; i < kWatchedSteps; ++i) inputs.push_back(mlp_input(i));
  const auto log_of = [&](const Config& config, Named& weights) {
    ::testing::internal::CaptureStderr();
    run_as_threads(2, config, [&] {
      DistributedModel<Mlp> model(nets[rank()]);
      to::SGD optimizer(nets[rank()]->parameters(), kOptions);
      auto train = step([&](torch::Tensor x) {
        auto loss = model(x).square().mean();
        model->backward(loss);
        return loss;
      });
      for (int i = 0; i < kWatchedSteps; ++i) {
        optimizer.zero_grad();
        train(inputs[i].clone());
        optimizer.step();
      }
      const auto state = to_map(model->state_dict());
      if (rank() == 0) weights = state;
    });
    return ::testing::internal::GetCapturedStderr();
  };
  const char* const warning =
      "and its gradients were dropped before a DistributedOptimizer stepped. An optimizer of "
      "torch::optim alone knows neither master weights";
  Named weights;
  EXPECT_EQ(log_of(stages(2), weights).find(warning), std::string::npos);
  expect_equal(weights, train_plain([](const Tensors&, int) {}), "value");
  nets = {make_mlp(), make_mlp()};
  expect_has(log_of(stages(2).bf16(true), weights),
             {"warning: a step has trained parameters of type BFloat16", warning,
              "Wrap it: auto optimizer = smp::distributed(plain)"});
}

/// Until the last of the steps that add up there is no `.grad` that could have been dropped.
TEST(PlainOptimizers, AreNotSeenInStepsThatAddUp) {
  torch::set_num_threads(1);
  constexpr int kPasses = 2;
  const auto log_of = [&](int ranks, bool is_plain) {
    std::vector<Mlp> nets{make_mlp(), make_mlp()};
    std::vector<torch::Tensor> inputs;
    for (int i = 0; i < kWatchedSteps; ++i) inputs.push_back(mlp_input(i));
    ::testing::internal::CaptureStderr();
    run_as_threads(ranks, stages(ranks).bf16(true), [&] {
      DistributedModel<Mlp> model(nets[rank()], ModelOptions().backward_passes_per_step(kPasses));
      std::optional<DistributedOptimizer<to::SGD>> distributed;
      if (!is_plain) distributed.emplace(model->parameters(), kOptions);
      to::SGD plain(nets[rank()]->parameters(), kOptions);
      auto train = step([&](torch::Tensor x) {
        auto loss = model(x).square().mean();
        model->backward(loss);
        return loss;
      });
      for (int i = 0; i < kWatchedSteps; ++i) {
        if (i % kPasses == 0) distributed ? distributed->zero_grad() : plain.zero_grad();
        train(inputs[i].clone());
        if ((i + 1) % kPasses == 0) distributed ? (void)distributed->step() : (void)plain.step();
      }
    });
    return ::testing::internal::GetCapturedStderr();
  };
  const char* const warning = "its gradients were dropped before a DistributedOptimizer stepped";
  for (const int ranks : {1, 2}) {
    EXPECT_EQ(log_of(ranks, /*is_plain=*/false).find(warning), std::string::npos);
    expect_has(log_of(ranks, /*is_plain=*/true), {warning});
  }
}

TEST(Replicas, ThatLeaveOutAStepAreRefused) {
  const auto text = error_of<UsageError>([&] {
    on_ranks(2, stages(1).ddp(true), [&](WatchedRank& here) {
      for (int i = 0; i < kWatchedSteps; ++i) {
        here.optimizer.zero_grad();
        if (i != 1 || rank() == 0) here.train(i);  // a batch that replica 1 does not like
        here.optimizer.step();
      }
    });
  });
  expect_has(text,
             {"step function \"train\": before this step, optimizer.step() was called 1 times "
              "on replica 0 and 2 times on replica 1. A replica that leaves out a step of "
              "training or an update sums its gradients with those of another step"});
}

/// One that leaves out the update as well ends before the others.
TEST(Replicas, ThatHaveFewerStepsLeaveTheOthersWaiting) {
  const auto text = error_of<TimeoutError>([&] {
    on_ranks(2, stages(1).ddp(true), [&](WatchedRank& here) {
      for (int i = 0; i < kWatchedSteps; ++i) {
        if (i == 1 && rank() == 1) continue;
        if (i == kWatchedSteps - 1 && rank() == 0) testing::wait_at_most(std::chrono::seconds(2));
        here.optimizer.zero_grad();
        here.train(i);
        here.optimizer.step();
      }
    });
  });
  expect_has(text,
             {"it waits for rank 1",
              "[while replicas reduced the gradients of step function \"train\", training step ",
              "of this rank: one that leaves out a step, or has fewer batches, ends before]"});
}

}  // namespace
}  // namespace smp
