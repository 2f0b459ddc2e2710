// SPDX-License-Identifier: Apache-2.0
// Step functions that change between steps: each graph known is found again, or another is made.

#include <functional>
#include <string>
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
  std::vector<Tensors> losses;  // by step, by microbatch
  std::vector<Tensors> evaluations;
  Named weights;
};

const torch::optim::SGDOptions kSgd = torch::optim::SGDOptions(0.2).momentum(0.9);

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
  torch::optim::SGD optimizer(net->parameters(), kSgd);
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
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kSgd);
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

}  // namespace
}  // namespace smp::testing
