// SPDX-License-Identifier: Apache-2.0
// When step functions are guarded, which structures of tensors they take and return, and tensors
// that are not read.

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <optional>
#include <random>
#include <unordered_map>

#include "tests/smp/oracle.h"
#include "tests/smp/step_fixture.h"

namespace smp::testing {
namespace {

/// Rank threads share the default generator, so their numbers come from one of their own.
at::Generator generator_of(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

/// A module with the same values whenever and wherever it is made.
template <class Net>
Net with_values_of(uint64_t seed, Net net) {
  const torch::NoGradGuard no_grad;
  auto generator = generator_of(seed);
  for (auto& parameter : net->parameters()) parameter.uniform_(-0.4, 0.4, generator);
  return net;
}

Mlp prototype() { return with_values_of(5, Mlp(4)); }

/// A run of a few steps whose loss has a weight that may change from step to step.
struct WeightedTraining {
  std::vector<double> weights;           // weights by step
  std::vector<int64_t> batch_sizes;      // batch sizes by step
  std::vector<int64_t> calls_seen = {};  // filled by `distributed`: in which step the function ran

  std::pair<torch::Tensor, torch::Tensor> batch(size_t step) const {
    auto generator = generator_of(100 + step);
    auto x = torch::randn({batch_sizes[step], MlpImpl::kWidth}, generator);
    auto y = torch::randn({batch_sizes[step], 1}, generator);
    return {x, y};
  }

  /// Plain libtorch with the weights in `effective`.
  Named plain(const std::vector<double>& effective) const {
    Mlp net = prototype();
    torch::optim::SGD optimizer(net->parameters(), kSgd);
    for (size_t i = 0; i < weights.size(); ++i) {
      optimizer.zero_grad();
      const auto [x, y] = batch(i);
      plain_backward(net->parameters(), 1, 2, [&, &x = x, &y = y](int m) {
        return torch::mse_loss(net(part(x, 2, m)), part(y, 2, m)) * effective[i];
      });
      optimizer.step();
    }
    return state_of(*net);
  }

  /// On two stages, under `guard`. Fills in which step's run of the function each step returned.
  Named distributed(const std::string& guard) {
    Named result;
    calls_seen.clear();
    run_as_threads(2, stages(2).guard(guard), [&] {
      DistributedModel<Mlp> model(prototype());
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
      size_t i = 0;
      auto train = step([&](torch::Tensor x, torch::Tensor y) {
        auto loss = torch::mse_loss(model(x), y) * weights[i];
        model->backward(loss);
        return std::make_pair(loss, static_cast<int64_t>(i));
      });
      for (; i < weights.size(); ++i) {
        optimizer.zero_grad();
        const auto [x, y] = batch(i);
        const auto returned = train(x, y).second;
        EXPECT_EQ(returned.size(), 2u);
        if (rank() == 1) calls_seen.push_back(returned[0]);
        optimizer.step();
      }
      const auto state = to_map(model->state_dict());
      if (rank() == 1) result = state;
    });
    return result;
  }
};

class GuardOptions : public ::testing::Test {
 protected:
  void SetUp() override { torch::set_num_threads(1); }
};

TEST_F(GuardOptions, EveryStepSeesEachChange) {
  WeightedTraining training{{1, 0.5, 0.25, 2}, {8, 8, 8, 8}};
  expect_equal(training.distributed("every_step"), training.plain({1, 0.5, 0.25, 2}), "weight");
  EXPECT_EQ(training.calls_seen, (std::vector<int64_t>{0, 1, 2, 3}));
}

TEST_F(GuardOptions, FirstStepReplaysWhatTheFirstStepDid) {
  WeightedTraining training{{1, 0.5, 0.25, 2}, {8, 8, 8, 8}};
  expect_equal(training.distributed("first_step"), training.plain({1, 1, 1, 1}), "weight");
  EXPECT_EQ(training.calls_seen, (std::vector<int64_t>{0, 0, 0, 0}));
}

TEST_F(GuardOptions, APeriodSeesChangesInItsSteps) {
  WeightedTraining training{{1, 0.5, 0.25, 2, 3, 4, 5}, {8, 8, 8, 8, 8, 8, 8}};
  expect_equal(training.distributed("3"), training.plain({1, 1, 1, 2, 2, 2, 5}), "weight");
  EXPECT_EQ(training.calls_seen, (std::vector<int64_t>{0, 0, 0, 3, 3, 3, 6}));
}

/// A number and a mask that the host draws for each microbatch, the same on all ranks.
class HostDraws {
 public:
  std::pair<double, torch::Tensor> draw() {
    std::vector<float> mask(MlpImpl::kWidth);
    for (float& value : mask) value = static_cast<float>(random_() % 3);
    return {0.25 + static_cast<double>(random_() % 100) / 50, torch::tensor(mask)};
  }

 private:
  std::mt19937 random_{3};
};

TEST_F(GuardOptions, EveryMicrobatchIsGivenItsOwn) {
  constexpr int kSteps = 3, kMicrobatches = 4;
  auto generator = generator_of(7);
  const auto x = torch::randn({8, MlpImpl::kWidth}, generator);
  const auto loss_of = [](auto& net, const torch::Tensor& x, HostDraws& draws) {
    auto [weight, mask] = draws.draw();
    return std::make_pair(net(x * mask).square().mean() * weight, weight);
  };
  Mlp plain = prototype();
  torch::optim::SGD optimizer(plain->parameters(), kSgd);
  HostDraws drawn;
  std::vector<std::vector<double>> weights(kSteps);
  std::vector<Tensors> losses(kSteps);
  for (int i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    losses[i] = plain_backward(plain->parameters(), 1, kMicrobatches, [&](int m) {
      auto [loss, weight] = loss_of(plain, part(x, kMicrobatches, m), drawn);
      weights[i].push_back(weight);
      return loss;
    });
    optimizer.step();
  }
  for (int count : {1, 2}) {
    const auto config = stages(count).microbatches(kMicrobatches).guard("every_microbatch");
    run_as_threads(count, config, [&] {
      DistributedModel<Mlp> model(prototype());
      DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
      HostDraws draws;
      auto train = step([&](torch::Tensor x) {
        auto [loss, weight] = loss_of(model, x, draws);
        model->backward(loss);
        return std::make_pair(loss, weight);
      });
      for (int i = 0; i < kSteps; ++i) {
        optimizer.zero_grad();
        const auto [loss, weight] = train(x);
        optimizer.step();
        expect_equal(loss.outputs(), losses[i], "loss");
        EXPECT_EQ(weight, weights[i]);
      }
      expect_equal(to_map(model->state_dict()), state_of(*plain), "value");
    });
  }
}

TEST_F(GuardOptions, EveryMicrobatchTakesTheSameWay) {
  const auto text = error_of_run<CaptureError>(1, stages(1).guard("every_microbatch"), [] {
    DistributedModel<Mlp> model(prototype());
    int run = 0;
    auto forward = step([&](torch::Tensor x) { return run++ == 0 ? model(x) : model(x).tanh(); });
    forward(torch::ones({4, MlpImpl::kWidth}));
  });
  expect_has(text, {"calls other operators on microbatch 1 than on microbatch 0",
                    "Between microbatches numbers and contents may differ"});
}

TEST_F(GuardOptions, EveryMicrobatchIsForOneBatchOfATensorParallelGroup) {
  const auto config =
      Config().tensor_parallel_degree(2).ddp(true).guard("every_microbatch").timeout_seconds(60);
  const auto text = error_of_run<UsageError>(2, config, [] {
    DistributedModel<Mlp> model(prototype());
    step([&](torch::Tensor x) { return model(x); })(torch::ones({4, MlpImpl::kWidth}));
  });
  expect_has(text, {"it draws for each microbatch (\"guard\"), so the ranks of a tensor-parallel "
                    "group cannot be given each other's"});
}

TEST_F(GuardOptions, InputsOfOtherShapesAreGuardedAlways) {
  WeightedTraining training{{1, 2, 3, 4, 5}, {8, 8, 4, 4, 8}};
  expect_equal(training.distributed("first_step"), training.plain({1, 1, 3, 3, 5}), "weight");
  EXPECT_EQ(training.calls_seen, (std::vector<int64_t>{0, 0, 2, 2, 4}));
}

/// Cuts itself into its first and its second half.
struct Scales {
  std::vector<double> values;
  Scales smp_slice(int64_t, int64_t microbatch, int64_t) const { return {{values[microbatch]}}; }
};

TEST_F(GuardOptions, ArgumentsThatCutThemselvesAreGuardedAlways) {
  torch::manual_seed(6);
  const auto x = torch::randn({8, MlpImpl::kWidth});
  run_as_threads(2, stages(2).guard("first_step"), [&] {
    Mlp net = prototype();
    DistributedModel<Mlp> model(prototype());
    int calls = 0;
    auto scaled = step([&](torch::Tensor part, Scales scales) {
      ++calls;
      return model(part) * scales.values[0];
    });
    torch::NoGradGuard no_grad;
    for (double scale : {1.0, 2.0}) {
      const auto got = scaled(x, Scales{{scale, 3 * scale}}).outputs();
      expect_equal(got, {net(part(x, 2, 0)) * scale, net(part(x, 2, 1)) * (3 * scale)}, "output");
    }
    EXPECT_EQ(calls, 4);
  });
}

/// Calls `program` with a model on one rank and then on both of two stages.
void on_stages(const std::function<void(DistributedModel<Mlp>&)>& program) {
  for (int count : {1, 2}) {
    SCOPED_TRACE(std::to_string(count) + " stages");
    run_as_threads(count, stages(count), [&] {
      DistributedModel<Mlp> model(prototype());
      program(model);
    });
  }
}

class Structures : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::set_num_threads(1);
    torch::manual_seed(6);
    x_ = torch::randn({8, MlpImpl::kWidth});
    y_ = torch::randn({8, 1});
    torch::NoGradGuard no_grad;
    for (int m = 0; m < 2; ++m) out_.push_back(prototype()(part(x_, 2, m)));
  }

  torch::Tensor x_, y_;
  Tensors out_;
};

TEST_F(Structures, UnorderedMapsInWhateverOrderEachRankKeepsThem) {
  on_stages([&](DistributedModel<Mlp>& model) {
    using Map = std::unordered_map<std::string, torch::Tensor>;
    auto forward = step([&](Map inputs) {
      auto y = model(inputs.at("x"));
      return Map{{"once", y}, {"weighted", y * inputs.at("weight")}};
    });
    for (size_t buckets : {1, 64}) {
      Map inputs;
      inputs.reserve(buckets * (1 + rank()));
      inputs.emplace("weight", y_);
      inputs.emplace("x", x_);
      auto got = forward(inputs);
      static_assert(std::is_same_v<decltype(got), std::unordered_map<std::string, StepOutput>>);
      expect_equal(got.at("once").outputs(), out_, "once");
      expect_equal(got.at("weighted").outputs(),
                   {out_[0] * part(y_, 2, 0), out_[1] * part(y_, 2, 1)}, "weighted");
    }
  });
}

TEST_F(Structures, OrderedDictsAndArrays) {
  on_stages([&](DistributedModel<Mlp>& model) {
    using Dict = torch::OrderedDict<std::string, torch::Tensor>;
    auto forward = step([&](Dict inputs, std::array<torch::Tensor, 2> halves) {
      Dict results;
      results.insert("whole", model(inputs["x"]));
      return std::make_tuple(results, std::array<torch::Tensor, 2>{halves[1], halves[0]});
    });
    Dict inputs;
    inputs.insert("unused", y_);
    inputs.insert("x", x_);
    auto [dict, array] = forward(inputs, std::array<torch::Tensor, 2>{x_, y_});
    expect_equal(dict["whole"].outputs(), out_, "dictionary");
    expect_equal(array[0].concat(), y_, "array");
    expect_equal(array[1].concat(), x_, "array");
  });
}

TEST_F(Structures, VectorsOfMapsOfOptionalTuples) {
  on_stages([&](DistributedModel<Mlp>& model) {
    using Element = std::optional<std::tuple<torch::Tensor, int>>;
    using Nested = std::vector<std::map<std::string, Element>>;
    auto forward = step([&](Nested inputs) {
      auto y = model(std::get<0>(*inputs[0].at("x")));
      return Nested{{{"none", std::nullopt}, {"y", std::make_tuple(y, 1)}},
                    {{"twice", std::make_tuple(y * 2, 2)}}};
    });
    auto got = forward(Nested{{{"x", std::make_tuple(x_, 5)}, {"y", std::nullopt}}});
    ASSERT_EQ(got.size(), 2u);
    EXPECT_FALSE(got[0].at("none").has_value());
    expect_equal(std::get<0>(*got[0].at("y")).outputs(), out_, "y");
    EXPECT_EQ(std::get<1>(*got[1].at("twice")), (std::vector<int>{2, 2}));
    expect_equal(std::get<0>(*got[1].at("twice")).outputs(), {out_[0] * 2, out_[1] * 2}, "twice");
  });
}

/// Three steps of a function that takes an unused tensor, computes a branch and returns results
/// that the loss does not depend on.
TEST_F(Structures, UnusedArgumentsAndOutputsTrainAsInOneProcess) {
  Mlp net = prototype();
  torch::optim::SGD plain(net->parameters(), kSgd);
  std::vector<Tensors> unused(2);
  for (int i = 0; i < 3; ++i) {
    plain.zero_grad();
    unused = {{}, {}};
    plain_backward(net->parameters(), 1, 2, [&](int m) {
      const auto out = net(part(x_, 2, m));
      unused[0].push_back(net->hidden[0](part(x_, 2, m)).detach());
      unused[1].push_back(torch::tanh(out).detach());
      return torch::mse_loss(out, part(y_, 2, m));
    });
    plain.step();
  }
  on_stages([&](DistributedModel<Mlp>& model) {
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
    auto train = step([&](torch::Tensor x, torch::Tensor y, torch::Tensor) {
      auto out = model(x);
      auto early = model.get_module()->hidden[0](x);
      auto late = torch::tanh(out);
      model->backward(torch::mse_loss(out, y));
      return std::make_pair(early, late);
    });
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      const auto [early, late] = train(x_, y_, torch::ones({8, 3}));
      optimizer.step();
      if (i < 2) continue;
      expect_equal(early.outputs(), unused[0], "output of an early branch");
      expect_equal(late.outputs(), unused[1], "output after the model");
    }
    expect_equal(to_map(model->state_dict()), state_of(*net), "weight");
  });
}

/// Updates its buffer with gradients on, so that the buffer gets a history.
struct SmoothedImpl : torch::nn::Module {
  SmoothedImpl() {
    fc = register_module("fc", torch::nn::Linear(MlpImpl::kWidth, 1));
    average = register_buffer("average", torch::zeros({1}));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = fc(x);
    average.mul_(0.5).add_(x.mean() * 0.5);
    return x;
  }
  torch::nn::Linear fc{nullptr};
  torch::Tensor average;
};
TORCH_MODULE(Smoothed);

Smoothed smoothed() { return with_values_of(5, Smoothed()); }

TEST_F(Structures, BuffersThatGetAHistoryAreRestoredAfterTheCapture) {
  Smoothed net = smoothed();
  torch::optim::SGD plain(net->parameters(), kSgd);
  for (int i = 0; i < 3; ++i) {
    plain.zero_grad();
    plain_backward(net->parameters(), 1, 2,
                   [&](int m) { return torch::mse_loss(net(part(x_, 2, m)), part(y_, 2, m)); });
    plain.step();
  }
  run_as_threads(1, stages(1), [&] {
    DistributedModel<Smoothed> model(smoothed());
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
    auto train = make_training(model);
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      train(x_, y_);
      optimizer.step();
    }
    expect_equal(to_map(model->state_dict()), state_of(*net), "weight or buffer");
  });
}

}  // namespace
}  // namespace smp::testing
