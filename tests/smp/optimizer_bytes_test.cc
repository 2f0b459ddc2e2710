// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/threads/run_ranks.h"
#include "partitioner/predict.h"
#include "runtime/runtime.h"
#include "runtime/session/session.h"
#include "runtime/step/planning.h"
#include "smp/optim.h"
#include "tests/smp/oracle.h"

// The optimizer's state in predictions, against the bytes that it holds after a step.
namespace smp {
namespace {

using namespace testing;
namespace to = torch::optim;

constexpr int kMicrobatches = 2;
constexpr double kUnknownIsAdam = 2;

Config config_of(int ranks) { return stages(ranks).microbatches(kMicrobatches); }

/// The bytes on a rank.
struct Bytes {
  int64_t weights = 0, predicted = 0, held = 0;
};

/// The prediction for this rank, by the plan of the first step.
Bytes predicted() {
  const auto& runtime = runtime::Runtime::get();
  const auto& first = runtime.first_step;
  const auto prediction =
      partitioner::predict(*first.graph, *first.plan, runtime::step_model(runtime, kMicrobatches));
  Bytes bytes;
  for (int s = 0; s < first.plan->stages(); ++s) {
    if (first.plan->rank_of_stage[s] != pp_rank()) continue;
    bytes.weights += prediction.stages[s].weights;
    bytes.predicted += prediction.stages[s].optimizer;
  }
  return bytes;
}

int64_t held_by(const OptimizerCore& optimizer) {
  int64_t bytes = 0;
  for (const auto& [name, param] : optimizer.local_state_dict().params) {
    for (const auto& [field, tensor] : param.tensors) {
      bytes += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return bytes;
}

using Net = torch::nn::Sequential;

Net make_net() {
  return Net(torch::nn::Linear(8, 16), torch::nn::Tanh(), torch::nn::Linear(16, 4),
             torch::nn::Tanh(), torch::nn::Linear(4, 2));
}

/// Calls `program(model, train)` on each rank, where `train()` runs a step.
template <class Program>
void run_ranks(const Config& config, const Program& program) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  const auto x = torch::randn({4, 8});
  std::vector<Net> nets;
  for (int i = 0; i < config.partitions(); ++i) {
    nets.push_back(make_net());
  }
  run_as_threads(static_cast<int>(config.partitions()), config, [&] {
    DistributedModel<Net> model(nets[rank()]);
    auto train = step([&](torch::Tensor input) {
      auto loss = model(input).square().mean();
      model->backward(loss);
      return loss;
    });
    program(model, [&] { return train(x).reduce_mean(); });
  });
}

/// The bytes of each rank of a program with an optimizer.
template <class Optimizer, class Options>
std::vector<Bytes> train(const Config& config, const Options& options) {
  std::vector<Bytes> bytes(config.partitions());
  run_ranks(config, [&](const DistributedModel<Net>& model, const auto& train_step) {
    DistributedOptimizer<Optimizer> optimizer(model->parameters(), options);
    train_step();
    bytes[rank()] = predicted();
    optimizer.step();
    bytes[rank()].held = held_by(optimizer);
  });
  return bytes;
}

/// Expects `factor` bytes of state for each of a trained parameter, in the prediction and after a
/// step, on one rank and on two.
template <class Optimizer, class Options>
void expect_factor(double factor, const Options& options, bool bf16 = false) {
  for (const int ranks : {1, 2}) {
    for (const Bytes& bytes : train<Optimizer>(config_of(ranks).bf16(bf16), options)) {
      EXPECT_GT(bytes.weights, 0);
      EXPECT_EQ(bytes.predicted, factor * static_cast<double>(bytes.weights));
      EXPECT_EQ(bytes.held, bytes.predicted);
    }
  }
}

TEST(OptimizerBytes, OfEachOptimizer) {
  expect_factor<to::SGD>(0, to::SGDOptions(0.1));
  expect_factor<to::SGD>(1, to::SGDOptions(0.1).momentum(0.9));
  expect_factor<optim::FusedSGD>(1, to::SGDOptions(0.1).momentum(0.9));
  expect_factor<to::Adam>(2, to::AdamOptions(0.1));
  expect_factor<to::Adam>(3, to::AdamOptions(0.1).amsgrad(true));
  expect_factor<to::AdamW>(2, to::AdamWOptions(0.1));
  expect_factor<optim::FusedAdamW>(3, to::AdamWOptions(0.1).amsgrad(true));
  expect_factor<to::Adagrad>(1, to::AdagradOptions(0.1));
  expect_factor<to::RMSprop>(1, to::RMSpropOptions(0.1));
  expect_factor<to::RMSprop>(2, to::RMSpropOptions(0.1).centered(true));
  expect_factor<to::RMSprop>(3, to::RMSpropOptions(0.1).centered(true).momentum(0.9));
  expect_factor<optim::Adadelta>(2, optim::AdadeltaOptions());
  expect_factor<optim::Lamb>(2, optim::LambOptions());
  expect_factor<optim::NovoGrad>(1, optim::NovoGradOptions());
}

/// A parameter of two bytes has a master of four, which the optimizer's tensors are like.
TEST(OptimizerBytes, WithMasters) {
  expect_factor<to::SGD>(2, to::SGDOptions(0.1), /*bf16=*/true);
  expect_factor<to::AdamW>(6, to::AdamWOptions(0.1), /*bf16=*/true);
}

/// LBFGS keeps directions and steps until its history is full.
TEST(OptimizerBytes, OfLbfgs) {
  const auto options = to::LBFGSOptions(0.1).history_size(2).max_iter(3).tolerance_change(0);
  run_ranks(config_of(1), [&](const DistributedModel<Net>& model, const auto& train_step) {
    DistributedOptimizer<to::LBFGS> optimizer(model->parameters(), options);
    for (int i = 0; i < 3; ++i) {
      optimizer.step([&] {
        optimizer.zero_grad();
        return train_step();
      });
    }
    ASSERT_EQ(optimizer.state().size(), 1u);
    const auto& state = static_cast<const to::LBFGSParamState&>(*optimizer.state().begin()->second);
    auto held = static_cast<int64_t>(state.d().nbytes() + state.prev_flat_grad().nbytes());
    for (const auto& list : {state.old_dirs(), state.old_stps()}) {
      for (const auto& tensor : list) held += static_cast<int64_t>(tensor.nbytes());
    }
    const Bytes bytes = predicted();
    EXPECT_EQ(bytes.predicted, 6 * bytes.weights);
    EXPECT_EQ(held, bytes.predicted);
  });
}

/// Groups have options of their own, and a model may have several optimizers.
TEST(OptimizerBytes, OfGroups) {
  for (const int ranks : {1, 3}) {
    std::vector<int64_t> held(ranks);
    run_ranks(config_of(ranks), [&](const DistributedModel<Net>& model, const auto& train_step) {
      const auto parameters = model->parameters();
      const auto some = [&](int first, int last) {
        return std::vector<torch::Tensor>(parameters.begin() + first, parameters.begin() + last);
      };
      std::vector<to::OptimizerParamGroup> groups;
      groups.emplace_back(some(0, 2), std::make_unique<to::SGDOptions>(0.1));
      groups.emplace_back(some(2, 4),
                          std::make_unique<to::SGDOptions>(to::SGDOptions(0.1).momentum(0.9)));
      DistributedOptimizer<to::SGD> sgd(groups, to::SGDOptions(0.1));
      DistributedOptimizer<to::Adam> adam(some(4, 6), to::AdamOptions(0.1));
      train_step();
      sgd.step();
      adam.step();
      held[rank()] = held_by(sgd) + held_by(adam);
      EXPECT_EQ(predicted().predicted, held[rank()]);
    });
    constexpr int64_t kMomentum = (16 * 4 + 4) * 4, kAdam = 2 * (4 * 2 + 2) * 4;
    EXPECT_EQ(std::accumulate(held.begin(), held.end(), int64_t{0}), kMomentum + kAdam);
  }
}

/// Each optimizer has state, and a master, of its own for a parameter of several.
TEST(OptimizerBytes, OfSeveralWithTheSameParameters) {
  for (const bool bf16 : {false, true}) {
    run_ranks(config_of(2).bf16(bf16), [&](const DistributedModel<Net>& model, const auto& train) {
      DistributedOptimizer<to::Adam> adam(model->parameters(), to::AdamOptions(0.1));
      DistributedOptimizer<to::SGD> sgd(model->parameters(), to::SGDOptions(0.1).momentum(0.9));
      train();
      adam.step();
      sgd.step();
      const Bytes bytes = predicted();
      EXPECT_GT(bytes.predicted, 0);
      EXPECT_EQ(bytes.predicted, held_by(adam) + held_by(sgd));
    });
  }
}

/// The configuration's value comes first; an optimizer that is not known, is made later, or is a
/// plain one, is taken for Adam.
TEST(OptimizerBytes, OfOptimizersThatAreNotKnown) {
  for (const Bytes& bytes :
       train<to::SGD>(config_of(2).optimizer_state_factor(1.5), to::SGDOptions(0.1))) {
    EXPECT_EQ(bytes.predicted, 1.5 * static_cast<double>(bytes.weights));
  }
  run_ranks(config_of(2), [&](const DistributedModel<Net>& model, const auto& train_step) {
    to::SGD plain(model->parameters(), 0.1);
    { const DistributedOptimizer<to::SGD> ended(model->parameters(), to::SGDOptions(0.1)); }
    train_step();
    const DistributedOptimizer<to::SGD> later(model->parameters(), to::SGDOptions(0.1));
    const Bytes bytes = predicted();
    EXPECT_EQ(bytes.predicted, kUnknownIsAdam * static_cast<double>(bytes.weights));
  });
}

/// One plan: all ranks reckon with world rank 0's optimizer.
TEST(OptimizerBytes, TheSameOnAllRanks) {
  run_ranks(config_of(2), [&](const DistributedModel<Net>& model, const auto& train_step) {
    std::unique_ptr<DistributedOptimizer<to::SGD>> optimizer;
    if (rank() == 0) {
      optimizer =
          std::make_unique<DistributedOptimizer<to::SGD>>(model->parameters(), to::SGDOptions(0.1));
    }
    train_step();
    EXPECT_EQ(predicted().predicted, 0);
  });
}

/// One of two ranks with the same value may have it by default.
TEST(OptimizerBytes, TheSameWhereOneRankSetsTheDefault) {
  for (const int setting : {0, 1}) {
    SCOPED_TRACE(setting);
    std::vector<Net> nets{make_net(), make_net()};
    comm::run_ranks(2, [&](const comm::CommunicatorPtr& world) {
      auto config = config_of(2).timeout_seconds(20);
      if (world->rank() == setting) config.optimizer_state_factor(kUnknownIsAdam);
      const runtime::ThreadRuntime here(
          runtime::start_runtime(config, world, std::vector<std::string>(2, "threads")));
      DistributedModel<Net> model(nets[rank()]);
      const DistributedOptimizer<to::SGD> optimizer(model->parameters(), to::SGDOptions(0.1));
      step([&](torch::Tensor input) {
        auto loss = model(input).square().mean();
        model->backward(loss);
        return loss;
      })(torch::ones({4, 8}));
      const Bytes bytes = predicted();
      const double expected = setting == 0 ? kUnknownIsAdam : 0;
      EXPECT_EQ(bytes.predicted, expected * static_cast<double>(bytes.weights));
    });
  }
}

}  // namespace
}  // namespace smp
