// SPDX-License-Identifier: Apache-2.0
// Ranks that do different things, and ranks that fail: every rank ends with the cause.

#include <chrono>
#include <stdexcept>
#include <string>

#include "tests/failure/patience.h"
#include "tests/smp/errors.h"

namespace smp::testing {
namespace {

using AcrossRanks = ErrorsTest;
using Failure = ErrorsTest;

/// From step `when` on.
TEST_F(AcrossRanks, LossWeightThatDiffers) {
  for (int when : {0, 1}) {
    SCOPED_TRACE("in step " + std::to_string(when));
    const auto text = error_of_training<UsageError>(
        2, stages(2), [&](int i, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor y) {
          const double weight = i < when ? 1.0 : (rank() == 0 ? 0.375 : 0.625);
          return torch::mse_loss(model(x), y) * weight;
        });
    expect_has(text, {"\"train\"", "constants", "0.375", "0.625", "pp rank 0", "pp rank 1"});
  }
}

/// It is the recorded weight on rank 0 and another on rank 1.
TEST_F(AcrossRanks, LossWeightThatStaysOnOneRank) {
  const auto text = error_of_training<UsageError>(
      2, stages(2), [&](int i, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor y) {
        const double weight = i == 0 || rank() == 0 ? 0.375 : 0.625;
        return torch::mse_loss(model(x), y) * weight;
      });
  expect_has(text, {"\"train\"", "constants", "0.375", "0.625"});
}

TEST_F(AcrossRanks, LiteralThatDiffers) {
  for (int when : {0, 1}) {
    SCOPED_TRACE("in step " + std::to_string(when));
    const auto text = error_of_training<UsageError>(
        2, stages(2), [&](int i, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor y) {
          const std::vector<float> weights = {1.0f, i < when ? 2.0f : 2.0f + rank(), 3.0f, 4.0f};
          return (torch::tensor(weights).unsqueeze(1) * (model(x) - y)).pow(2).mean();
        });
    expect_has(text, {"\"train\"", "constants"});
    EXPECT_EQ(text.find("(nothing)\" against \"(nothing)"), std::string::npos) << text;
  }
}

TEST_F(AcrossRanks, OtherOperators) {
  for (int when : {0, 1}) {
    SCOPED_TRACE("in step " + std::to_string(when));
    const auto text = error_of_training<UsageError>(
        2, stages(2), [&](int i, DistributedModel<Mlp>& model, torch::Tensor x, torch::Tensor y) {
          const auto out = model(x);
          return i >= when && rank() == 1 ? torch::l1_loss(out, y) : torch::mse_loss(out, y);
        });
    expect_has(text,
               {"\"train\"", "other operators", "pp rank 0 has \"operator 21 (aten::mse_loss)",
                "pp rank 1 has \"operator 21 (aten::l1_loss)"});
  }
}

/// Goes another way inside on rank 1.
struct RankDependentImpl : torch::nn::Module {
  RankDependentImpl() {
    in = register_module("in", torch::nn::Linear(MlpImpl::kWidth, 4));
    out = register_module("out", torch::nn::Linear(4, 1));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = in(x);
    return out(rank() == 1 ? torch::relu(x) : torch::tanh(x));
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
};
TORCH_MODULE(RankDependent);

struct HolderImpl : torch::nn::Module {
  HolderImpl() { block = register_module("block", RankDependent()); }
  torch::Tensor forward(torch::Tensor x) { return block(x); }
  RankDependent block{nullptr};
};
TORCH_MODULE(Holder);

TEST_F(AcrossRanks, OtherOperatorsInsideAModuleAreNamedWithIt) {
  const auto text = error_of_run<UsageError>(2, stages(2), [&] {
    DistributedModel<Holder> model{Holder()};
    auto forward = step([&](torch::Tensor x) { return model(x); }, StepOptions().name("train"));
    forward(x_);
  });
  expect_has(text, {"\"train\" calls other operators on pp rank 0 and pp rank 1",
                    "pp rank 0 has \"operator 2 (aten::tanh, in module \"block\")",
                    "pp rank 1 has \"operator 2 (aten::relu, in module \"block\")",
                    "must not depend on the rank"});
}

TEST_F(AcrossRanks, OtherStepFunctions) {
  const auto text = error_of_run<UsageError>(2, stages(2), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto train = make_training(model, StepOptions().name("train"));
    auto other = make_training(model, StepOptions().name("other"));
    train(x_, y_);
    (rank() == 0 ? train : other)(x_, y_);
  });
  expect_has(text, {"pp rank 0 calls step function \"train\", pp rank 1 of the same pipeline step "
                    "function \"other\"",
                    "(StepOptions().name) are numbered as a rank makes them"});
}

TEST_F(AcrossRanks, OtherBatches) {
  for (int when : {0, 1}) {
    SCOPED_TRACE("in step " + std::to_string(when));
    const auto text = error_of_run<UsageError>(2, stages(2), [&] {
      DistributedModel<Mlp> model(Mlp(4));
      auto train = make_training(model);
      for (int i = 0; i < 2; ++i) train(i < when ? x_ : x_ + rank(), y_);
    });
    expect_has(text, {"\"step 0\"", "different batches", "smp::dp_rank()", "smp::rank()"});
  }
}

TEST_F(AcrossRanks, BatchesOfOtherShapes) {
  const auto text = error_of_run<UsageError>(2, stages(2), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto train = make_training(model);
    const int64_t size = rank() == 0 ? 8 : 4;
    train(x_.narrow(0, 0, size), y_.narrow(0, 0, size));
  });
  expect_has(text, {"\"step 0\"", "[4, 6]", "[2, 6]"});
}

TEST_F(AcrossRanks, ReplicasMayUseOtherBatchesButNotOtherModels) {
  run_as_threads(2, stages(1).ddp(true), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto train = make_training(model);
    train(x_ + rank(), y_);
  });
  const auto text = error_of_run<UsageError>(2, stages(1).ddp(true), [&] {
    DistributedModel<Mlp> model(Mlp(4, 0, rank() == 0 ? 6 : 7));
    auto train = make_training(model);
    train(x_, y_);
  });
  expect_has(text, {"model differs between ranks", "in.weight"});
}

TEST_F(AcrossRanks, ReplicasThatBeginWithOtherOperators) {
  const auto text = error_of_run<UsageError>(2, stages(1).ddp(true), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto train = make_training(model, StepOptions().name("train"));
    const int64_t size = rank() == 0 ? 8 : 4;
    train(x_.narrow(0, 0, size), y_.narrow(0, 0, size));
  });
  expect_has(text,
             {"\"train\" calls other operators on rank 1 than on rank 0 in its first step. All "
              "replicas must begin with the same step function on inputs of the same shape"});
}

TEST_F(AcrossRanks, ModelsThatDiffer) {
  const auto wider = error_of_run<UsageError>(2, stages(2), [&] {
    DistributedModel<Mlp> model(Mlp(4, 0, rank() == 0 ? 6 : 7));
    auto train = make_training(model);
    train(x_, y_);
  });
  expect_has(wider,
             {"model differs between ranks", "rank 0", "rank 1", "in.weight", "[6, 6]", "[6, 7]"});
  const auto deeper = error_of_run<UsageError>(2, stages(2), [&] {
    DistributedModel<Mlp> model(Mlp(3 + rank()));
    auto train = make_training(model);
    train(x_, y_);
  });
  expect_has(deeper, {"model differs between ranks", "hidden3.weight"});
}

/// One rank's user code throws: the run ends with that error, quickly.
void expect_cause(const std::function<void(int step)>& in_step,
                  const std::function<void(int step)>& between_steps) {
  torch::manual_seed(5);
  const auto x = torch::randn({8, MlpImpl::kWidth});
  const auto y = torch::randn({8, 1});
  const auto start = std::chrono::steady_clock::now();
  const auto text = error_of_run<std::runtime_error>(4, stages(2).ddp(true), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    int i = 0;
    auto train = step([&](torch::Tensor a, torch::Tensor b) {
      in_step(i);
      auto loss = torch::mse_loss(model(a), b);
      model->backward(loss);
      return loss;
    });
    for (; i < 3; ++i) {
      between_steps(i);
      train(x, y);
    }
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  expect_has(text, {"the tokenizer broke"});
  EXPECT_LT(seconds.count(), 60.0);
}

TEST_F(Failure, ExceptionInTheFunctionOnOneRankEndsAllWithTheCause) {
  const auto nothing = [](int) {};
  for (int where : {0, 1, 3}) {
    for (int when : {0, 1}) {
      SCOPED_TRACE("rank " + std::to_string(where) + ", step " + std::to_string(when));
      expect_cause(
          [&](int i) {
            if (rank() == where && i == when) throw std::runtime_error("the tokenizer broke");
          },
          nothing);
    }
  }
}

TEST_F(Failure, ExceptionBetweenStepsOnOneRankEndsAllWithTheCause) {
  const auto nothing = [](int) {};
  for (int when : {0, 2}) {
    expect_cause(nothing, [&](int i) {
      if (rank() == 2 && i == when) throw std::runtime_error("the tokenizer broke");
    });
  }
}

TEST_F(Failure, RankThatLeavesEarlyIsNamedByTheTimeOut) {
  const auto start = std::chrono::steady_clock::now();
  const auto text = error_of_run<CommError>(2, stages(2), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto train = make_training(model);
    train(x_, y_);
    wait_at_most(std::chrono::seconds(2));
    if (rank() == 0) train(x_, y_);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  expect_has(text, {"rank 1"});
  EXPECT_LT(seconds.count(), 60.0);
}

}  // namespace
}  // namespace smp::testing
