// SPDX-License-Identifier: Apache-2.0
#include "smp/amp.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>

#include "smp/autocast.h"
#include "tests/graph/cast_counter.h"
#include "tests/smp/gated.h"
#include "tests/smp/grad_scaler_trace.h"
#include "tests/smp/precision.h"

// `smp::amp::GradScaler` and autocast in step functions.
namespace smp {
namespace {

using namespace testing;
using namespace testing::precision;
using amp::Autocast;
using amp::GradScaler;
using amp::GradScalerOptions;
using testing::precision::Trace;

/// Counts its steps.
struct CountingSgd : torch::optim::SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    ++steps;
    return torch::full({}, steps);
  }
  int steps = 0;
};

TEST(GradScaler, EqualsTorchStepByStep) {
  for (const ScalerRun& run : scaler_runs()) {
    GradScaler scaler(GradScalerOptions()
                          .init_scale(run.init_scale)
                          .growth_factor(run.growth_factor)
                          .backoff_factor(run.backoff_factor)
                          .growth_interval(run.growth_interval));
    const auto weight = torch::zeros({3}).requires_grad_();
    CountingSgd optimizer(Tensors{weight}, torch::optim::SGDOptions(1));
    scaler.scale(torch::zeros({}));
    const double values[] = {HUGE_VAL, -HUGE_VAL, std::numeric_limits<double>::quiet_NaN()};
    int number = 0;
    for (const ScalerStep& step : run.steps) {
      weight.mutable_grad() = torch::ones({3});
      if (step.overflow) weight.mutable_grad()[number % 3] = values[number / 3 % 3];
      ++number;
      const int before = optimizer.steps;
      const auto returned = scaler.step(optimizer);
      EXPECT_EQ(optimizer.steps > before, step.stepped);
      ASSERT_EQ(returned.has_value(), step.stepped);
      if (returned) {
        EXPECT_EQ(returned->item<int>(), optimizer.steps);
      }
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), step.scale) << "step " << number;
      EXPECT_EQ(nlohmann::json::parse(scaler.state_dict()).at("_growth_tracker"),
                step.growth_tracker);
    }
  }
}

/// torch's rule once more, by hand, where the recorded runs do not go.
TEST(GradScaler, FollowsTheRule) {
  const auto generator = at::detail::createCPUGenerator(3);
  for (int interval = 1; interval < 5; ++interval) {
    GradScaler scaler(GradScalerOptions().init_scale(8).growth_interval(interval));
    const auto weight = torch::zeros({4}).requires_grad_();
    CountingSgd optimizer(Tensors{weight}, torch::optim::SGDOptions(1));
    float scale = 8;
    int successes = 0;
    for (int step = 0; step < 100; ++step) {
      scaler.scale(torch::ones({}));
      const bool overflow = torch::rand({}, generator).item<double>() < 0.3;
      weight.mutable_grad() = torch::full({4}, overflow ? HUGE_VAL : 1.0);
      scaler.unscale_(optimizer);
      // Gradients that are not finite stay as they are.
      const double gradient = weight.grad()[0].item<double>();
      EXPECT_EQ(gradient, overflow ? HUGE_VAL : 1.0F / scale);
      EXPECT_EQ(scaler.step(optimizer).has_value(), !overflow);
      if (step == 50) {
        scaler.update(2.5);
        scale = 2.5;
        continue;
      }
      scaler.update();
      if (overflow) {
        scale /= 2;
        successes = 0;
      } else if (++successes == interval) {
        scale *= 2;
        successes = 0;
      }
      ASSERT_EQ(scaler.get_scale(), scale) << "step " << step;
    }
  }
}

TEST(GradScaler, DoesNothingWhenDisabled) {
  GradScaler scaler(GradScalerOptions().enabled(false).growth_factor(0));
  const auto weight = torch::zeros({2}).requires_grad_();
  CountingSgd optimizer(Tensors{weight}, torch::optim::SGDOptions(1));
  const auto loss = torch::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  weight.mutable_grad() = torch::full({2}, HUGE_VAL);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.step(optimizer).has_value());
  scaler.update();
  EXPECT_EQ(optimizer.steps, 1);
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_FALSE(scaler.is_enabled());
  EXPECT_EQ(scaler.state_dict(), "{}");
}

TEST(GradScaler, SavesAndLoads) {
  const auto weight = torch::zeros({2}).requires_grad_();
  CountingSgd optimizer(Tensors{weight}, torch::optim::SGDOptions(1));
  const auto train = [&](GradScaler& scaler, bool overflow) {
    scaler.scale(torch::ones({}));
    weight.mutable_grad() = torch::full({2}, overflow ? HUGE_VAL : 1.0);
    scaler.step(optimizer);
    scaler.update();
  };
  GradScaler scaler(GradScalerOptions().growth_interval(3));
  scaler.set_growth_factor(3);
  scaler.set_backoff_factor(0.25);
  for (const bool overflow : {false, true, false, false}) train(scaler, overflow);
  const auto state = scaler.state_dict();
  EXPECT_EQ(nlohmann::json::parse(state),
            nlohmann::json::parse(R"({"scale": 16384.0, "growth_factor": 3.0,
      "backoff_factor": 0.25, "growth_interval": 3, "_growth_tracker": 2})"));
  GradScaler other;
  other.load_state_dict(state);
  EXPECT_EQ(other.state_dict(), state);
  train(other, false);
  EXPECT_EQ(other.get_scale(), 49152);
  EXPECT_EQ(other.get_growth_interval(), 3);
}

TEST(GradScalerErrors, AreThoseOfTorch) {
  const auto weight = torch::zeros({2}).requires_grad_();
  CountingSgd optimizer(Tensors{weight}, torch::optim::SGDOptions(1));
  GradScaler scaler;
  const auto error = [](const std::function<void()>& action) {
    return error_of<UsageError>(action);
  };
  expect_has(error([&] { scaler.update(); }),
             {"Attempted update but _scale is None. This may indicate your script did not use "
              "scaler.scale(loss or outputs) earlier in the iteration"});
  expect_has(error([&] { scaler.step(optimizer); }), {"Attempted step but _scale is None"});
  scaler.scale(torch::ones({}));
  expect_has(error([&] { scaler.update(); }), {"No inf checks were recorded prior to update"});
  expect_has(error([&] { scaler.step(optimizer); }),
             {"No inf checks were recorded for this optimizer"});
  weight.mutable_grad() = torch::ones({2});
  scaler.unscale_(optimizer);
  expect_has(error([&] { scaler.unscale_(optimizer); }),
             {"unscale_() has already been called on this optimizer since the last update()"});
  scaler.step(optimizer);
  expect_has(error([&] { scaler.step(optimizer); }),
             {"step() has already been called since the last update()"});
  expect_has(error([&] { scaler.unscale_(optimizer); }),
             {"unscale_() is being called after step()"});
  scaler.update();

  const auto half = torch::zeros({2}, torch::kHalf).requires_grad_();
  CountingSgd of_half(Tensors{half}, torch::optim::SGDOptions(1));
  half.mutable_grad() = torch::ones({2}, torch::kHalf);
  expect_has(error([&] { scaler.unscale_(of_half); }), {"Attempting to unscale FP16 gradients"});

  expect_has(error([] { GradScaler(GradScalerOptions().growth_factor(1)); }),
             {"The growth factor must be > 1.0, got 1"});
  expect_has(error([] { GradScaler(GradScalerOptions().backoff_factor(1)); }),
             {"The backoff factor must be < 1.0, got 1"});
  expect_has(error_of<CheckpointError>([&] { scaler.load_state_dict("{}"); }),
             {"The source state dict is empty, possibly because it was saved from a disabled "
              "instance of GradScaler"});
  for (const char* text : {R"({"scale": "large"})", "large"}) {
    expect_has(error_of<CheckpointError>([&] { scaler.load_state_dict(text); }),
               {"the saved state of a GradScaler is malformed: expected what state_dict() gives",
                std::string("got ") + text});
  }
}

TEST(GradScalerErrors, CallsOnTheWrongSideOfTheStep) {
  const auto text_of = [](const std::function<void(GradScaler&, CountingSgd&)>& call) {
    return error_of_run<UsageError>(1, stages(1), [&] {
      GradScaler scaler;
      DistributedModel<Mlp> model(Mlp(1));
      CountingSgd optimizer(model->parameters(), torch::optim::SGDOptions(1));
      auto train = step([&](torch::Tensor x) {
        call(scaler, optimizer);
        auto loss = model(x).sum();
        model->backward(scaler.scale(loss));
        return loss;
      });
      train(torch::ones({2, MlpImpl::kWidth}));
    });
  };
  const std::string inside = " was called inside a step function. Gradients are complete when the";
  expect_has(text_of([](auto& scaler, auto& optimizer) { scaler.step(optimizer); }),
             {"GradScaler: step" + inside});
  expect_has(text_of([](auto& scaler, auto& optimizer) { scaler.unscale_(optimizer); }),
             {"GradScaler: unscale_" + inside});
  expect_has(text_of([](auto& scaler, auto&) { scaler.update(); }),
             {"GradScaler: update" + inside});
  expect_has(text_of([](auto&, auto&) { GradScaler().scale(torch::ones({})); }),
             {"a loss scale was used in a step function that began without it. Make the "
              "GradScaler after smp::init and outside of step functions"});
}

TEST(Autocast, Nests) {
  const auto is = [](bool enabled, torch::Dtype type) {
    EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), enabled);
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), type);
  };
  const auto before = at::autocast::get_autocast_dtype(at::kCPU);
  {
    const Autocast outer(torch::kHalf);
    is(true, torch::kHalf);
    {
      const Autocast inner(torch::kBFloat16);
      is(true, torch::kBFloat16);
    }
    {
      const Autocast off(torch::kHalf, at::kCPU, false);
      is(false, torch::kHalf);
    }
    is(true, torch::kHalf);
  }
  is(false, before);
  // Parameters that change between two scopes are cast anew.
  const auto weight = torch::ones({2, 2}).requires_grad_();
  const auto product = [&] {
    const Autocast autocast(torch::kBFloat16);
    return torch::mm(weight, torch::eye(2)).detach();
  };
  EXPECT_EQ(product().scalar_type(), torch::kBFloat16);
  {
    torch::NoGradGuard no_grad;
    weight.fill_(2);
  }
  expect_equal(product(), torch::full({2, 2}, 2, torch::kBFloat16), "product");
}

constexpr double kScale = 1024;
constexpr int kInterval = 2;

/// In which type autocast computes, and the number that overflows it.
struct Computed {
  torch::Dtype type;
  double spike;
};

const Computed kFp16{torch::kHalf, 1e6};
const Computed kBf16{torch::kBFloat16, HUGE_VAL};

/// One process, the rule of torch.amp.GradScaler by hand.
Trace train_plain(const Computed& computed) {
  Trace trace;
  auto net = make_net();
  const auto parameters = unique_parameters(*net);
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.05));
  float scale = kScale;
  int successes = 0;
  for (int step = 0; step < kSteps; ++step) {
    const auto [x, y] = batch_of(step, computed.spike);
    const auto gradients = plain_gradients(parameters, [&, x = x, y = y](int m) {
      const KeyedRandom random(kSeed, "step 0", step, m);
      const int count = Layout::kMicrobatches;
      torch::Tensor loss;
      {
        const Autocast autocast(computed.type);
        loss = loss_of(net(part(x, count, m)), part(y, count, m));
      }
      trace.losses.push_back(noted(loss));
      return loss * torch::full({}, scale);
    });
    const bool finite = all_finite(gradients);
    if (finite) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (gradients[i].defined()) parameters[i].mutable_grad() = gradients[i] * (1 / scale);
      }
      optimizer.step();
    }
    trace.skipped.push_back(!finite);
    if (!finite) {
      scale *= 0.5F;
      successes = 0;
    } else if (++successes == kInterval) {
      scale *= 2;
      successes = 0;
    }
    trace.scales.push_back(scale);
  }
  trace.weights = state_of(*net);
  return trace;
}

Trace train_ranks(const Layout& layout, const Computed& computed) {
  Trace trace;
  Losses losses(trace);
  std::mutex mutex;
  std::vector<Net> nets;
  for (int i = 0; i < layout.ranks(); ++i) nets.push_back(make_net());
  int runs_of_function = 0;
  run_as_threads(layout.ranks(), config_of(layout), [&] {
    DistributedModel<Net> model(nets[rank()]);
    DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                        torch::optim::AdamWOptions(0.05));
    GradScaler scaler(GradScalerOptions().init_scale(kScale).growth_interval(kInterval));
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      torch::Tensor loss;
      {
        const Autocast autocast(computed.type);
        loss = loss_of(model(x), y);
      }
      model->backward(scaler.scale(loss));
      if (rank() == 0) ++runs_of_function;
      return loss;
    });
    for (int i = 0; i < kSteps; ++i) {
      const auto [x, y] = batch_of(i, computed.spike);
      optimizer.zero_grad();
      losses.note(i, train(own(x), own(y)));
      const bool stepped = scaler.step(optimizer).has_value();
      scaler.update();
      const std::lock_guard lock(mutex);
      if (static_cast<int>(trace.scales.size()) == i) {
        trace.scales.push_back(scaler.get_scale());
        trace.skipped.push_back(!stepped);
      }
      // The same on all ranks.
      EXPECT_EQ(trace.scales[i], scaler.get_scale());
      EXPECT_EQ(trace.skipped[i], !stepped);
    }
    const auto state = to_map(model->state_dict());
    const std::lock_guard lock(mutex);
    trace.weights = state;
  });
  EXPECT_EQ(runs_of_function, layout.guard == "first_step" ? 1 : kSteps);
  return trace;
}

TEST(GradScaler, TrainsOnRanksAsInOneProcess) {
  torch::set_num_threads(1);
  for (const Computed& computed : {kFp16, kBf16}) {
    const Trace plain = train_plain(computed);
    EXPECT_EQ(count_skipped(plain), 3);  // one rank's microbatch is enough
    for (const Layout& layout : layouts()) {
      SCOPED_TRACE(::testing::Message() << layout << ", " << computed.type);
      expect_same(train_ranks(layout, computed), plain);
    }
  }
}

/// Layers whose weights are large enough for shared casts: one that two scopes use, one without
/// gradient, and one that is cast in none.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    for (const char* name : {"first", "second", "third"}) {
      layers.push_back(register_module(name, torch::nn::Linear(kWidth, kWidth)));
    }
    fixed = register_parameter("fixed", torch::randn({kWidth, kWidth}), /*requires_grad=*/false);
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    {
      const Autocast autocast(torch::kBFloat16);
      x = torch::gelu(layers[0](x));
      x = torch::matmul(x, fixed) / kWidth;
    }
    x = layers[1](x.to(torch::kFloat));
    const Autocast autocast(torch::kBFloat16);
    x = layers[2](layers[0](torch::gelu(x)));
    return torch::mse_loss(x, y);
  }
  static Tensors batch(int64_t size) {
    return {torch::randn({size, kWidth}), torch::randn({size, kWidth})};
  }
  static constexpr int64_t kWidth = 128;
  std::vector<torch::nn::Linear> layers;
  torch::Tensor fixed;
};
TORCH_MODULE(Wide);

auto wide_case(int stages, int microbatches, const std::string& pipeline) {
  TrainingCase<Wide, Recipe<torch::optim::SGD, torch::optim::SGDOptions>> result(
      [] { return Wide(); }, {torch::optim::SGDOptions(0.1)});
  result.config = testing::stages(stages).microbatches(microbatches).pipeline(pipeline);
  result.ranks = stages;
  result.microbatches = microbatches;
  result.batch = batches_of<Wide>(2 * microbatches, result.steps);
  return result;
}

TEST(Autocast, SharedCastsHaveTheBitsOfOneProcess) {
  auto again = wide_case(2, 4, "1f1b");
  again.prepare = [](Wide& net) {
    for (const auto& layer : net->layers) set_activation_checkpointing(*layer);
  };
  for (const auto& training :
       {wide_case(1, 3, "interleaved"), wide_case(2, 4, "1f1b"), wide_case(2, 4, "zb_h1"), again}) {
    SCOPED_TRACE(training.config.pipeline());
    expect_same(training.run_on_ranks(), training.run_plain());
  }
}

TEST(Autocast, CastsEachWeightOnceAStep) {
  auto training = wide_case(1, 4, "interleaved");
  training.on_ranks([](auto& own) {
    own.step(0);
    const graph::testing::CastCounter counter(own.model->parameters());
    own.step(1);
    EXPECT_EQ(counter.take(), 5) << "two weights, their biases and the fixed one";
  });
}

/// A leaf casts its parameters itself.
TEST(Autocast, LeafOnThreads) {
  const auto training = gated_case(1);
  expect_same(training.run_on_ranks(), training.run_plain());
}

/// It waits for other ranks' casts, and gathers nothing meanwhile.
TEST(Autocast, LeafWithShardedParametersOnThreads) {
  const auto training = gated_case(kGatedReplicas);
  auto sharded = training.run_on_ranks();
  const auto plain = training.run_plain();
  sharded.gradients = plain.gradients;  // those of shards are compared by the optimizer's results
  expect_same(sharded, plain);
}

}  // namespace
}  // namespace smp
