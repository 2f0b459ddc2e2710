// SPDX-License-Identifier: Apache-2.0
// Step functions that change between steps: each graph known is found again, or another is made.

#include <ATen/CPUGeneratorImpl.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

using Call = std::function<torch::Tensor(torch::Tensor)>;

/// A training run that is done once by plain libtorch and once distributed.
struct Scenario {
  int steps = 5;
  int64_t microbatches = 2;
  double dropout = 0;
  /// Called before each step, as a program would do between steps.
  std::function<void(int step, MlpImpl& net)> before = [](int, MlpImpl&) {};
  /// The step function's body up to the loss.
  std::function<torch::Tensor(int step, const Call& model, torch::Tensor x, torch::Tensor y)> loss =
      [](int, const Call& model, torch::Tensor x, torch::Tensor y) {
        return torch::mse_loss(model(x), y);
      };
  /// The batch size of a training step.
  std::function<int64_t(int step)> batch_size = [](int) { return 8; };
  /// The batch size of the evaluation after each step; 0: none.
  int64_t evaluation_size = 0;
};

struct Run {
  std::vector<Tensors> losses;  // losses by step, by microbatch
  std::vector<Tensors> evaluations;
  Named weights;
};

const torch::optim::SGDOptions kGuardSgd = torch::optim::SGDOptions(0.2).momentum(0.9);

std::vector<std::pair<torch::Tensor, torch::Tensor>> make_batches(const Scenario& scenario) {
  torch::manual_seed(3);
  std::vector<std::pair<torch::Tensor, torch::Tensor>> batches;
  for (int i = 0; i < scenario.steps; ++i) {
    const int64_t size = scenario.batch_size(i);
    batches.emplace_back(torch::randn({size, MlpImpl::kWidth}), torch::randn({size, 1}));
  }
  return batches;
}

torch::Tensor evaluation_inputs(const Scenario& scenario) {
  torch::manual_seed(4);
  return torch::randn({scenario.evaluation_size, MlpImpl::kWidth});
}

Mlp make_prototype(const Scenario& scenario) {
  torch::manual_seed(5);
  return Mlp(4, scenario.dropout);
}

Run run_plain(const Scenario& scenario) {
  Mlp net = make_prototype(scenario);
  const auto batches = make_batches(scenario);
  torch::optim::SGD optimizer(net->parameters(), kGuardSgd);
  const Call call = [&](torch::Tensor x) { return net(x); };
  const int count = static_cast<int>(scenario.microbatches);
  Run run;
  for (int i = 0; i < scenario.steps; ++i) {
    scenario.before(i, *net);
    optimizer.zero_grad();
    const auto& [x, y] = batches[i];
    run.losses.push_back(plain_backward(net->parameters(), 1, count, [&, &x = x, &y = y](int m) {
      const KeyedRandom random(kSeed, "step 0", i, m);
      return scenario.loss(i, call, part(x, count, m), part(y, count, m));
    }));
    optimizer.step();
    if (scenario.evaluation_size == 0) continue;
    const auto inputs = evaluation_inputs(scenario);
    torch::NoGradGuard no_grad;
    run.evaluations.emplace_back();
    for (int m = 0; m < count; ++m) {
      const KeyedRandom random(kSeed, "step 1", i, m);
      run.evaluations.back().push_back(net(part(inputs, count, m)));
    }
  }
  run.weights = state_of(*net);
  return run;
}

Run run_distributed(const Scenario& scenario, int stage_count) {
  const Mlp prototype = make_prototype(scenario);
  const auto batches = make_batches(scenario);
  const auto inputs = evaluation_inputs(scenario);
  std::vector<Run> runs(stage_count);
  run_as_threads(stage_count, stages(stage_count).microbatches(scenario.microbatches), [&] {
    Mlp net(4, scenario.dropout);
    copy_values(*prototype, *net);
    DistributedModel<Mlp> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kGuardSgd);
    Run& run = runs[rank()];
    int i = 0, calls = 0;
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      ++calls;
      auto loss = scenario.loss(
          i, [&](torch::Tensor input) { return model(input); }, x, y);
      model->backward(loss);
      return loss;
    });
    auto evaluate = step([&](torch::Tensor x) { return model(x); });
    for (; i < scenario.steps; ++i) {
      scenario.before(i, *net);
      optimizer.zero_grad();
      run.losses.push_back(train(batches[i].first, batches[i].second).outputs());
      EXPECT_EQ(calls, i + 1);
      optimizer.step();
      if (scenario.evaluation_size == 0) continue;
      run.evaluations.push_back(evaluate(inputs).outputs());
    }
    run.weights = to_map(model->state_dict());
  });
  for (int r = 1; r < stage_count; ++r) {
    for (size_t i = 0; i < runs[0].losses.size(); ++i) {
      expect_equal(runs[r].losses[i], runs[0].losses[i], "losses on rank " + std::to_string(r));
    }
  }
  return runs[0];
}

void check(const Scenario& scenario) {
  const Run plain = run_plain(scenario);
  for (int stage_count : {1, 2, 3}) {
    SCOPED_TRACE(std::to_string(stage_count) + " stages");
    const Run got = run_distributed(scenario, stage_count);
    ASSERT_EQ(got.losses.size(), plain.losses.size());
    ASSERT_EQ(got.evaluations.size(), plain.evaluations.size());
    for (size_t i = 0; i < plain.losses.size(); ++i) {
      const auto where = " of step " + std::to_string(i);
      expect_equal(got.losses[i], plain.losses[i], "loss" + where);
      if (!plain.evaluations.empty()) {
        expect_equal(got.evaluations[i], plain.evaluations[i], "evaluation" + where);
      }
    }
    expect_equal(got.weights, plain.weights, "weight");
  }
}

class Guard : public ::testing::Test {
 protected:
  void SetUp() override { torch::set_num_threads(1); }
  Scenario scenario_;
};

TEST_F(Guard, NothingChanges) {
  scenario_.dropout = 0.3;
  check(scenario_);
}

TEST_F(Guard, AnnealedLossWeightThatReturnsToItsFirstValue) {
  scenario_.loss = [](int step, const Call& model, torch::Tensor x, torch::Tensor y) {
    const double weight = step == 4 ? 1.0 : 1.0 / (1 << step);
    const auto out = model(x);
    return torch::mse_loss(out, y) + weight * out.pow(2).mean();
  };
  check(scenario_);
}

TEST_F(Guard, TrainEvalTrainInOneStepFunction) {
  scenario_.dropout = 0.3;
  scenario_.before = [](int step, MlpImpl& net) { net.train(step != 1 && step != 2); };
  check(scenario_);
}

TEST_F(Guard, DropoutProbabilityChanges) {
  scenario_.dropout = 0.3;
  scenario_.before = [](int step, MlpImpl& net) { net.drop->options.p(0.1 * (step + 1)); };
  check(scenario_);
}

TEST_F(Guard, LoopThatShrinksAndGrowsBack) {
  scenario_.before = [](int step, MlpImpl& net) {
    constexpr int kDepths[] = {4, 2, 3, 4, 2};
    net.depth = kDepths[step];
  };
  check(scenario_);
}

TEST_F(Guard, LoopThatGrowsBeyondTheFirst) {
  scenario_.before = [](int step, MlpImpl& net) {
    constexpr int kDepths[] = {1, 3, 4, 1, 4};
    net.depth = kDepths[step];
  };
  check(scenario_);
}

TEST_F(Guard, RepeatedModelCallsChange) {
  scenario_.loss = [](int step, const Call& model, torch::Tensor x, torch::Tensor y) {
    auto loss = torch::mse_loss(model(x), y);
    for (int i = 0; i < step % 3; ++i) loss = loss + torch::mse_loss(model(x * 0.5), y);
    return loss;
  };
  check(scenario_);
}

TEST_F(Guard, LiteralFromAHostVector) {
  scenario_.loss = [](int step, const Call& model, torch::Tensor x, torch::Tensor y) {
    std::vector<float> weights;
    for (int64_t i = 0; i < x.size(0); ++i) weights.push_back(0.1f * (step % 4) + 0.2f * i);
    const auto literal = torch::tensor(weights).unsqueeze(1);
    return (literal * (model(x) - y).pow(2)).mean();
  };
  check(scenario_);
}

TEST_F(Guard, ShorterLastBatch) {
  scenario_.dropout = 0.3;
  scenario_.batch_size = [](int step) { return step == 2 || step == 4 ? 4 : 8; };
  check(scenario_);
}

TEST_F(Guard, EvaluationWithAnotherBatchSize) {
  scenario_.dropout = 0.3;
  scenario_.evaluation_size = 6;
  scenario_.before = [](int step, MlpImpl& net) { net.train(step % 2 == 0); };
  check(scenario_);
}

TEST_F(Guard, OtherOperatorsBecauseOfACounter) {
  scenario_.loss = [](int step, const Call& model, torch::Tensor x, torch::Tensor y) {
    return step % 2 == 0 ? torch::mse_loss(model(x), y) : torch::l1_loss(model(x), y);
  };
  check(scenario_);
}

TEST_F(Guard, OneMicrobatch) {
  scenario_.microbatches = 1;
  scenario_.dropout = 0.3;
  scenario_.evaluation_size = 3;
  check(scenario_);
}

/// libtorch makes a tensor of the number without an operator, of the loss's shape and type.
TEST_F(Guard, NumbersThatAreWrittenWhereAMaskIsSet) {
  scenario_.loss = [](int, const Call& model, torch::Tensor x, torch::Tensor y) {
    auto out = model(x).clone();
    out.index_put_({out < 0}, 0.5);
    return torch::mse_loss(out, y);
  };
  check(scenario_);
}

// -- Random numbers

/// Draws from the default generator on a thread of its own, as a DataLoader's worker does, and
/// compares with a generator from which nothing else draws.
class DrawingThread {
 public:
  DrawingThread() {
    torch::manual_seed(kThreadSeed);
    thread_ = std::thread([this] {
      const auto own = at::make_generator<at::CPUGeneratorImpl>(kThreadSeed);
      for (int i = 0; i < kDraws || !ended_; ++i) {
        disturbed_ += !torch::equal(torch::rand({3}), torch::rand({3}, own));
      }
    });
  }
  ~DrawingThread() {
    ended_ = true;
    thread_.join();
    EXPECT_EQ(disturbed_, 0) << "draws of the thread";
  }
  DrawingThread(const DrawingThread&) = delete;
  DrawingThread& operator=(const DrawingThread&) = delete;

 private:
  static constexpr uint64_t kThreadSeed = 17;
  static constexpr int kDraws = 1000;
  std::atomic<bool> ended_ = false;
  int disturbed_ = 0;
  std::thread thread_;
};

TEST_F(Guard, ThreadsOfTheProgramMayDrawWhileItSteps) {
  scenario_.steps = 150;
  scenario_.dropout = 0.3;
  const auto expected = run_plain(scenario_);
  std::optional<DrawingThread> thread;
  std::once_flag started;
  // All ranks have constructed their models by then.
  scenario_.before = [&](int step, MlpImpl&) {
    if (step == 1) std::call_once(started, [&] { thread.emplace(); });
  };
  const auto got = run_distributed(scenario_, 2);
  thread.reset();
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    expect_equal(got.losses[i], expected.losses[i], "loss of step " + std::to_string(i));
  }
  expect_equal(got.weights, expected.weights, "weight");
}

/// The numbers to compare with are drawn beside a thread, too.
TEST_F(Guard, ThreadsOfTheProgramMayDrawWhilePlainCodeDrawsKeyedNumbers) {
  scenario_.dropout = 0.3;
  const auto expected = run_plain(scenario_);
  std::optional<DrawingThread> thread;
  scenario_.before = [&](int step, MlpImpl&) {
    if (step == 1) thread.emplace();
  };
  const auto got = run_plain(scenario_);
  thread.reset();
  expect_equal(got.weights, expected.weights, "weight");
}

// -- State that a run of the function leaves behind

/// The tensors that a step function may keep on a rank.
struct Kept {
  torch::Tensor state = torch::zeros({2, 1}), before = torch::zeros({2, 1});
  bool seen = false;
};

using Keeping = std::function<torch::Tensor(const Call& model, torch::Tensor x, Kept& kept)>;

/// Calls the step function once on two stages. Returns how often the function ran on a rank.
int runs_of(const Keeping& function, int64_t microbatches) {
  std::atomic<int> runs = 0;
  run_as_threads(2, stages(2).microbatches(microbatches), [&] {
    Kept kept;
    Mlp net(2);
    DistributedModel<Mlp> model(net);
    auto evaluate = step([&](torch::Tensor x) {
      runs += rank() == 0;
      return function([&](torch::Tensor in) { return model(in); }, x, kept);
    });
    evaluate(torch::ones({2 * microbatches, MlpImpl::kWidth}));
  });
  return runs;
}

void expect_hidden_state(const Keeping& function, int64_t microbatches = 2) {
  runs_of(function, 1);  // which leaves it to none
  const auto text = error_of<CaptureError>([&] { runs_of(function, microbatches); });
  expect_has(text, {"step function \"step 0\"",
                    "uses a tensor that escaped from an earlier run of a step function (hidden "
                    "state). What a microbatch leaves to the next one is a buffer"});
}

TEST_F(Guard, AStateIsRefusedInTheFirstCallInWhichAMicrobatchWouldFindIt) {
  expect_hidden_state([](const Call& model, torch::Tensor x, Kept& kept) {
    auto h = model(x) + kept.state;
    kept.state = h.detach();
    return h.sum();
  });
  // The step returns it.
  expect_hidden_state([](const Call& model, torch::Tensor x, Kept& kept) {
    return kept.state = model(x) + kept.state;
  });
  // It grows.
  expect_hidden_state([](const Call& model, torch::Tensor x, Kept& kept) {
    kept.state = torch::cat({kept.state, model(x)});
    return kept.state.sum();
  });
  // It is not there before the first microbatch, and used where it is.
  expect_hidden_state([](const Call& model, torch::Tensor x, Kept& kept) {
    auto h = model(x);
    if (std::exchange(kept.seen, true)) h = h + kept.state;
    kept.state = h;
    return h.sum();
  });
  // It is the input.
  expect_hidden_state([](const Call& model, torch::Tensor x, Kept& kept) {
    return model(x) + std::exchange(kept.state, x).sum();
  });
  // It is read two microbatches later.
  expect_hidden_state(
      [](const Call& model, torch::Tensor x, Kept& kept) {
        auto h = model(x) + kept.before;
        kept.before = std::exchange(kept.state, h);
        return h.sum();
      },
      3);
}

TEST_F(Guard, TensorsThatAreKeptAndNeverReadAreNoState) {
  const auto plain = [](const Call& model, torch::Tensor x, Kept&) { return model(x); };
  EXPECT_EQ(runs_of(plain, 3), 1);
  const auto keeping = [](const Call& model, torch::Tensor x, Kept& kept) {
    kept.state = model(x);
    return kept.state.sum();
  };
  EXPECT_EQ(runs_of(keeping, 3), 3) << "each microbatch is asked";
  EXPECT_EQ(runs_of(keeping, 1), 1);
}

}  // namespace
}  // namespace smp::testing
