// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <ostream>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "partitioner/checkpointing.h"
#include "partitioner/predict.h"
#include "pipeline/observer.h"
#include "runtime/parameters/parameter_shards.h"
#include "runtime/step/checkpointed_modules.h"
#include "runtime/step/planning.h"
#include "runtime/step/units.h"
#include "smp/smp.h"
#include "tests/action_hook.h"
#include "tests/smp/sharded.h"

// Units of sharded data parallelism: how many there are, and the memory that they are predicted to
// need against the memory that they take.
namespace smp {
namespace {

using namespace testing;

const dp::ShardedParameters& shards() {
  return *runtime::Runtime::get().parameter_shards()->parameters();
}

struct Counter final : pipeline::Observer {
  void on_begin(size_t, const pipeline::Action& action) override {
    if (action.kind != pipeline::Action::Kind::kUnshard) return;
    ++gathers;
    units.insert(action.stage);
  }
  int gathers = 0;
  std::set<int> units;
};

/// Units of a rank, how often one is gathered in a step, and elements that are live at most.
struct Counts {
  size_t units = 0;
  int gathers = 0;
  int64_t live = 0;

  bool operator==(const Counts& other) const {
    return units == other.units && gathers == other.gathers && live == other.live;
  }
};

std::ostream& operator<<(std::ostream& out, const Counts& counts) {
  return out << counts.units << " units, " << counts.gathers << " gathers, " << counts.live
             << " live";
}

/// The last step of a small GPT on two ranks that divide parameters of at least `threshold`
/// elements.
Counts counts_of(int64_t threshold) {
  Counter counter;
  Counts counts;
  auto tested = sharded_pipelines<TinyGpt, torch::optim::SGD>({1, 2, 1, "interleaved", 2},
                                                              Sharded{2, 2, 1, threshold},
                                                              std::function<TinyGpt()>(gpt), kSgd);
  tested.evaluates = false;
  tested.after_step = [&](auto&, int step) {
    auto& observers = runtime::Runtime::get().execution.observers;
    if (rank() != 0) return;
    if (step == 0) observers.push_back(&counter);
    if (step == 1) counts = {counter.units.size(), counter.gathers, shards().peak_live()};
    if (step == 1) observers.clear();
  };
  tested.run_on_ranks();
  return counts;
}

/// 33 parameters, of which 18 are biases and norms.
TEST(ShardedUnits, SmallParametersFillNone) {
  EXPECT_EQ(counts_of(/*threshold=*/100), (Counts{6, 11, 2816}));
  EXPECT_EQ(counts_of(/*threshold=*/0), (Counts{7, 13, 2576}));
}

/// One weight, of which the second stage reads a copy.
struct TiedEndsImpl : torch::nn::Module {
  TiedEndsImpl() { weight = register_parameter("weight", torch::randn({8, 8}) * 0.3); }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    x = torch::tanh(x.matmul(weight));
    const auto scope = partition(1);
    return torch::mse_loss(x.matmul(weight), y);
  }
  static Tensors batch(int64_t size) { return {torch::randn({size, 8}), torch::randn({size, 8})}; }

  torch::Tensor weight;
};
TORCH_MODULE(TiedEnds);

/// A copy is whole in any case: the ranks that read it gather nothing.
TEST(ShardedUnits, CopiesAreNotGathered) {
  std::vector<Counter> counters(4);
  auto tested = sharded_pipelines<TiedEnds, torch::optim::SGD>(
      {2, 2, 2, "1f1b", 2}, Sharded{2, 2, 2, /*threshold=*/0},
      std::function<TiedEnds()>([] { return TiedEnds(); }), kSgd);
  tested.after_step = [&](auto&, int step) {
    auto& observers = runtime::Runtime::get().execution.observers;
    if (step == 0) observers.push_back(&counters[rank()]);
    if (step == 1) observers.clear();
    if (step == 1) EXPECT_EQ(counters[rank()].units.size(), pp_rank() == 0 ? 1U : 0U);
  };
  expect_as_plain(tested);
}

/// Four weights on two stages. The other way round all that is computed is on the second, which
/// reads copies of the first one's.
struct TwoWaysImpl : torch::nn::Module {
  TwoWaysImpl() {
    for (int i = 0; i < 4; ++i) {
      weights.push_back(register_parameter("w" + std::to_string(i), torch::randn({8, 8}) * 0.3));
    }
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    x = torch::tanh(x.matmul(weights[0]).matmul(weights[1]));
    const auto scope = partition(1);
    return torch::mse_loss(x.matmul(weights[2]).matmul(weights[3]), y);
  }
  torch::Tensor other_way(torch::Tensor x, torch::Tensor y) {
    const auto scope = partition(1);
    for (const int i : {3, 2, 1, 0}) x = torch::tanh(x.matmul(weights[i]));
    return torch::mse_loss(x, y);
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(TwoWays);

/// An owner gathers the parameters of a copy one after the other.
TEST(ShardedUnits, CopiesKeepTheLimit) {
  const Sharded run{2, 2, /*microbatches=*/2, /*threshold=*/0, /*max_live=*/64};
  std::vector<TwoWays> nets;  // a plain one, and those of ranks
  for (int i = 0; i < 5; ++i) {
    torch::manual_seed(3);
    nets.emplace_back();
  }
  const auto x = torch::randn({8, 8}), y = torch::randn({8, 8});
  run_as_threads(4, sharded_config(run).partitions(2).pipeline("1f1b"), [&] {
    TwoWays net = nets[1 + rank()];
    DistributedModel<TwoWays> model(net);
    auto train = step([&](torch::Tensor a, torch::Tensor b) {
      auto loss = net->loss(a, b);
      model->backward(loss);
      return loss;
    });
    auto evaluate = step([&](torch::Tensor a, torch::Tensor b) { return net->other_way(a, b); });
    const auto a = part(x, 2, dp_rank()), b = part(y, 2, dp_rank());
    train(a, b);
    const auto loss = evaluate(a, b).reduce_mean();
    EXPECT_NEAR(loss.item<double>(), nets[0]->other_way(a, b).item<double>(), 1e-6);
    if (pp_rank() == 0) EXPECT_EQ(shards().peak_live(), 64) << "rank " << rank();
  });
}

/// Three products. In `loss` stage i reads the weights of stage `order[i]`.
struct RingImpl : torch::nn::Module {
  RingImpl() {
    for (int i = 0; i < 6; ++i) {
      const auto weight = torch::randn({8, i % 2 == 0 ? 8 : 4}) * 0.3;
      weights.push_back(register_parameter("w" + std::to_string(i), weight));
    }
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y, const std::vector<int>& order) {
    for (int i = 0; i < 3; ++i) {
      const auto scope = partition(i);
      const auto* of_stage = &weights[2 * order[i]];
      x = torch::tanh(x.matmul(of_stage[0]) + torch::cat({x.matmul(of_stage[1]), y}, 1));
    }
    const auto scope = partition(2);
    return x.square().mean();
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Ring);

/// Every rank sends copies and takes some, and gathers of one replica wait for the others, which
/// come to each copy at another time. Half of the weights are not divided.
TEST(ShardedUnits, CopiesGoRoundWhereReplicasAreLate) {
  const Sharded run{2, 2, /*microbatches=*/2, /*threshold=*/64};
  std::vector<Ring> nets;  // a plain one, and those of ranks
  for (int i = 0; i < 7; ++i) {
    torch::manual_seed(3);
    nets.emplace_back();
  }
  const auto x = torch::randn({8, 8}), y = torch::randn({8, 4});
  run_as_threads(6, sharded_config(run).partitions(3).pipeline("1f1b"), [&] {
    int copies = 0;
    ActionHook late([&](const pipeline::Action& action) {
      if (!action.is_copy()) return;
      ++copies;
      std::this_thread::sleep_for(std::chrono::milliseconds(rank() * 7 % 5 * 4));
    });
    runtime::Runtime::get().execution.observers.push_back(&late);
    Ring net = nets[1 + rank()];
    DistributedModel<Ring> model(net);
    auto train = step([&](torch::Tensor a, torch::Tensor b) {
      auto loss = net->loss(a, b, {0, 1, 2});
      model->backward(loss);
      return loss;
    });
    auto evaluate = step([&](torch::Tensor a, torch::Tensor b) {
      return net->loss(a, b, {2, 0, 1});
    });
    const auto a = part(x, 2, dp_rank()), b = part(y, 2, dp_rank());
    train(a, b);
    for (int i = 0; i < 2; ++i) {
      const auto loss = evaluate(a, b).reduce_mean();
      EXPECT_NEAR(loss.item<double>(), nets[0]->loss(a, b, {2, 0, 1}).item<double>(), 1e-6);
    }
    EXPECT_EQ(copies, 2 * 2);
  });
}

/// A pipeline, and whether modules run again.
struct Predicted {
  const char* pipeline;
  int partitions, microbatches;
  int64_t threshold, max_live;
  bool tied = false;
  bool runs_again = false;
};

std::ostream& operator<<(std::ostream& out, const Predicted& run) {
  return out << run.pipeline << ", " << run.partitions << " partitions, " << run.microbatches
             << " microbatches, from " << run.threshold << " elements, at most " << run.max_live
             << (run.tied ? ", tied" : "") << (run.runs_again ? ", runs again" : "");
}

/// The prediction of this rank.
int64_t predicted_bytes(int microbatches) {
  const auto& runtime = runtime::Runtime::get();
  const auto& [graph, plan] = std::tie(runtime.first_step.graph, runtime.first_step.plan);
  const auto regions = partitioner::find_module_regions(
      *graph, runtime::checkpointed_modules(runtime), plan->stage_of_operator);
  const auto model = runtime::step_model(runtime, microbatches).regions(regions);
  return partitioner::predict(*graph, *plan, model).gathered.at(pp_rank());
}

/// The bytes that this rank keeps for backwards at most: by stages, and by their units.
std::pair<double, double> kept_bytes(int microbatches) {
  const auto& runtime = runtime::Runtime::get();
  const auto& [graph, plan] = std::tie(runtime.first_step.graph, runtime.first_step.plan);
  const auto regions = partitioner::find_module_regions(
      *graph, runtime::checkpointed_modules(runtime), plan->stage_of_operator);
  const auto model = runtime::step_model(runtime, microbatches).regions(regions);
  auto step = runtime::plan_step(runtime.config(), "", *graph, *plan, runtime.topology().pp_size(),
                                 model, /*settled=*/false);
  partitioner::Plan units = *plan;
  runtime::divide_into_units(*graph, model, units, step);
  const auto of_units = runtime::schedule_of_units(step, *step.units);
  return {step.simulation.peak_memory.at(pp_rank()), of_units.simulation.peak_memory.at(pp_rank())};
}

/// The two largest units of each rank follow each other here, so that the bound is exact.
class GatheredBytes : public ::testing::TestWithParam<Predicted> {};

TEST_P(GatheredBytes, AreAsPredicted) {
  const Predicted run = GetParam();
  auto tested = sharded_pipelines<TinyGpt, torch::optim::SGD>(
      {run.partitions, 2, run.microbatches, run.pipeline, 2},
      Sharded{2, 2, run.microbatches, run.threshold, run.max_live},
      std::function<TinyGpt()>([&] { return TinyGpt(run.tied); }), kSgd);
  tested.evaluates = false;
  tested.config.trace_execution_times(false).cost_model("h100");  // one plan everywhere
  if (run.runs_again) {
    tested.prepare = [](TinyGpt& net) {
      for (auto& module : net->up) set_activation_checkpointing(module);
      for (auto& module : net->attention_in) set_activation_checkpointing(module);
    };
  }
  tested.after_step = [&](auto&, int) {
    const int64_t measured = shards().peak_live() * static_cast<int64_t>(sizeof(float));
    EXPECT_EQ(measured, predicted_bytes(run.microbatches)) << "rank " << rank();
    const auto [by_stages, by_units] = kept_bytes(run.microbatches);
    const bool splits = run.pipeline[0] == 'z';
    EXPECT_LE(by_units, by_stages) << "rank " << rank();
    if (!splits) EXPECT_EQ(by_units, by_stages) << "rank " << rank();
  };
  tested.run_on_ranks();
}

INSTANTIATE_TEST_SUITE_P(Layouts, GatheredBytes,
                         ::testing::Values(Predicted{"interleaved", 1, 2, 0, 1000000},
                                           Predicted{"interleaved", 1, 2, 100, 2000},
                                           Predicted{"interleaved", 1, 2, 100, 1},
                                           Predicted{"interleaved", 1, 2, 0, 1000000, false, true},
                                           Predicted{"simple", 2, 2, 0, 1000000},
                                           Predicted{"1f1b", 2, 4, 0, 1000000},
                                           Predicted{"1f1b", 2, 4, 0, 1000000, true},
                                           Predicted{"1f1b", 2, 4, 0, 1000000, true, true},
                                           Predicted{"1f1b", 3, 3, 100, 1},
                                           Predicted{"zbv", 2, 4, 0, 1000000},
                                           Predicted{"zb_h1", 2, 4, 0, 1000000},
                                           Predicted{"interleaved_1f1b", 2, 4, 100, 1600}));

}  // namespace
}  // namespace smp
