// SPDX-License-Identifier: Apache-2.0
#include "partitioner/partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "partitioner/complete.h"
#include "partitioner/cost.h"
#include "partitioner/cuts.h"
#include "partitioner/data_flow.h"
#include "partitioner/verify.h"
#include "partitioner/weight_casts.h"
#include "tests/error_of.h"
#include "tests/partitioner/chain.h"
#include "tests/partitioner/random_graph.h"

namespace smp::partitioner::testing {
namespace {

using graph::Graph;
using graph::ValueId;
using smp::testing::error_of;
using smp::testing::error_or_none;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- Against brute force -------------------------------------------------------------------

/// All that counts when plans are compared, taken from the finished plan.
struct Score {
  bool splits_weight = false;
  int64_t foreign = 0, step = 0;
  std::vector<int> stages;
};

int64_t to_units(const Graph& graph, double us) {
  double total = 0;
  for (const graph::Operator& op : graph.operators) total += operator_time_us(graph, op);
  return std::llround(us * 1e12 / total);
}

/// The score of graphs that do not train.
std::optional<Score> score(const Graph& graph, const std::vector<int>& stages,
                           const std::vector<int>& ranks, const Owners& owner, int microbatches) {
  Plan plan = complete_plan(graph, ranks, stages, owner);
  plan.reason_of_operator.resize(stages.size());
  if (!error_or_none([&] { verify_plan(graph, plan); }).empty()) return std::nullopt;
  Score score;
  score.stages = stages;
  const std::vector<ValueId> weights = split_weights(graph);
  const std::vector<double> costs = operator_costs(graph, 0.5);
  std::vector<int64_t> time(ranks.size(), 0);
  for (size_t i = 0; i < stages.size(); ++i) {
    time[stages[i]] += std::llround(costs[i] * 1e12);
    if (i + 1 == stages.size() || stages[i] == stages[i + 1]) continue;
    score.splits_weight |= weights[i] != graph::kUndefined;
    for (int stage : {stages[i], stages[i + 1]})
      time[stage] += to_units(graph, message_us({}, false));
  }
  for (const Transfer& t : plan.transfers) {
    const double us = transfer_us({}, graph.values[t.value].meta.nbytes(), false);
    for (int stage : {t.from, t.to}) time[stage] += to_units(graph, us);
  }
  int64_t slowest = 0;
  for (size_t s = 0; s < ranks.size(); ++s) {
    const auto visits = std::count(ranks.begin(), ranks.end(), ranks[s]);
    slowest = std::max<int64_t>(slowest, time[s] * visits);
    score.step += time[s];
  }
  score.step += std::max(microbatches - 1, 1) * slowest;
  for (const Replica& r : plan.replicas) {
    const graph::Value& value = graph.values[r.value];
    if (owner.count(value.name) == 0 || owner.at(value.name) == ranks[r.stage]) continue;
    score.foreign += value.meta.nbytes();
  }
  return score;
}

bool operator<(const Score& a, const Score& b) {
  return std::tie(a.splits_weight, a.foreign, a.step) <
         std::tie(b.splits_weight, b.foreign, b.step);
}

/// The best of all assignments of operators to stages that keep the pins and pass `verify_plan`.
std::optional<Score> brute_force(const Graph& graph, const std::vector<int>& ranks,
                                 const std::vector<Pin>& pins, const Owners& owner,
                                 int microbatches) {
  std::optional<Score> best;
  std::vector<int> stages(graph.operators.size(), 0);
  const std::function<void(size_t)> visit = [&](size_t next) {
    if (next == stages.size()) {
      if (stages.back() + 1 != static_cast<int>(ranks.size())) return;
      for (const Pin& pin : pins) {
        if (ranks[stages[pin.operator_index]] != pin.rank) return;
      }
      const std::optional<Score> s = score(graph, stages, ranks, owner, microbatches);
      if (s && (!best || *s < *best)) best = s;
      return;
    }
    for (int step : {0, 1}) {
      stages[next] = stages[next - 1] + step;
      if (stages[next] < static_cast<int>(ranks.size())) visit(next + 1);
    }
  };
  visit(1);
  return best;
}

TEST(Partition, EqualsBruteForceOnRandomPrograms) {
  std::mt19937 random(3);
  int possible = 0, impossible = 0, with_owners = 0, revisited = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    RandomProgram program(seed);
    Graph& graph = program.graph();
    for (graph::Operator& op : graph.operators) {
      op.cost.forward_us = 100.0 * static_cast<double>(1 + random() % 4);  // dearer than to send
      op.cost.saved_bytes = static_cast<int64_t>(random() % 3);
    }
    const int partitions = 2 + static_cast<int>(random() % 3);
    Owners owner;
    if (seed % 2 == 0) {
      for (const char* name : {"t0", "t1", "t2"}) {
        if (random() % 2 == 0) owner[name] = static_cast<int>(random() % partitions);
      }
    }
    const int microbatches = 1 + static_cast<int>(random() % 8);
    const auto options = PartitionOptions(partitions)
                             .step(StepModel(microbatches))
                             .memory_weight(0.5)
                             .tolerance(0)
                             .owner(owner);
    std::optional<Score> expected;
    try {
      Constraints constraints = find_constraints(graph, options);
      const std::vector<int> ranks = list_stages(constraints.pins, partitions);
      expected = brute_force(graph, ranks, constraints.pins, owner, microbatches);
      revisited += expected && static_cast<int>(ranks.size()) > partitions ? 1 : 0;
    } catch (const PartitionError&) {
      continue;  // one operator writes tensors of two ranks
    }
    if (!expected) {
      ++impossible;
      EXPECT_THROW(partition(graph, options), PartitionError) << "seed " << seed;
      continue;
    }
    ++possible;
    with_owners += owner.empty() ? 0 : 1;
    const Plan plan = partition(graph, options);
    const auto got = score(graph, plan.stage_of_operator, plan.rank_of_stage, owner, microbatches);
    ASSERT_TRUE(got.has_value());
    ASSERT_EQ(got->splits_weight, expected->splits_weight) << "seed " << seed;
    ASSERT_EQ(got->foreign, expected->foreign) << "seed " << seed;
    // The search stops at one part in ten thousand.
    ASSERT_LE(static_cast<double>(got->step), static_cast<double>(expected->step) * 1.0001)
        << "seed " << seed << "\n"
        << graph.to_string();
  }
  std::cout << possible << " possible (" << with_owners << " with owners, " << revisited
            << " of them with a rank of several stages), " << impossible << " impossible\n";
  EXPECT_GT(possible, 100);
  EXPECT_GT(with_owners, 30);
  EXPECT_GT(impossible, 50);
}

// ---- Models ----------------------------------------------------------------------------------

TEST(Partition, BalancesAChainAndKeepsWeightsWhole) {
  Chain chain(4);
  const Plan plan = partition(chain.b.graph(), PartitionOptions(2));
  EXPECT_THAT(plan.stage_of_operator, ElementsAre(0, 0, 0, 0, 1, 1, 1, 1, 1));
  EXPECT_THAT(plan.transfers,
              ElementsAre(Transfer{chain.results[1].id, 0, 1, /*needs_gradient=*/true}));
  EXPECT_TRUE(plan.replicas.empty());
  EXPECT_EQ(plan.owner,
            (Owners{{"fc0.weight", 0}, {"fc1.weight", 0}, {"fc2.weight", 1}, {"fc3.weight", 1}}));
  EXPECT_THAT(plan.stage_of_output, ElementsAre(1));
  EXPECT_THAT(plan.stage_of_root, ElementsAre(1));
  EXPECT_EQ(plan.reason_of_operator[0], "balance: 50.0% of cost");
  EXPECT_EQ(plan.reason_of_operator[1], "cut 0|1 would send a view of fc0.weight");
}

TEST(Partition, SplitsAWeightOnlyIfThereIsNoOtherWay) {
  Chain chain(1);
  const Plan plan = partition(chain.b.graph(), PartitionOptions(3));
  EXPECT_THAT(plan.stage_of_operator, ElementsAre(0, 1, 2));
  EXPECT_EQ(plan.transfers.size(), 2u);
}

TEST(Partition, WeighsTransfersAgainstBalance) {
  GraphBuilder b;
  b.grad_mode = false;
  Ref x = b.op("aten::relu", {b.input(ones(1024, 256))});  // 1 MiB: 180 us at each end
  b.cost(1000);
  x = b.op("aten::sum.dim_IntList",
           {x, c10::IValue(std::vector<int64_t>{0}), false, c10::IValue()});
  b.cost(100);
  b.output(b.op("aten::relu", {x}));
  b.cost(1000);
  const auto options = PartitionOptions(2).memory_weight(0).tolerance(0).step(StepModel(8));
  EXPECT_THAT(partition(b.graph(), options).stage_of_operator, ElementsAre(0, 0, 1));
  b.graph().operators[1].cost.forward_us = 500;
  EXPECT_THAT(partition(b.graph(), options).stage_of_operator, ElementsAre(0, 0, 1))
      << "1500 and 1000 us with 1 KiB between them, or 1180 and 1680 us";
  b.graph().operators[0].cost.forward_us = 2000;
  EXPECT_THAT(partition(b.graph(), options).stage_of_operator, ElementsAre(0, 1, 1));
}

TEST(Partition, KeepsModulesWholeWithinTheTolerance) {
  GraphBuilder b;
  b.grad_mode = false;
  Ref x = b.input(ones(2, 2));
  for (const char* scope : {"a.x", "a.y", "b.x", "b.y"}) {
    b.scope = scope;
    x = b.op("aten::relu", {x});
    b.cost(1000);
  }
  b.output(x);
  const auto plan = [&](double second, double tolerance) {
    b.graph().operators[1].cost.forward_us = second;
    b.graph().operators[2].cost.forward_us = b.graph().operators[3].cost.forward_us =
        (1000 - second) / 2;
    const auto options = PartitionOptions(2).memory_weight(0).step(StepModel(8));
    return partition(b.graph(), PartitionOptions(options).tolerance(tolerance)).stage_of_operator;
  };
  EXPECT_THAT(plan(10, 0), ElementsAre(0, 1, 1, 1)) << "1000 | 1000 us";
  EXPECT_THAT(plan(10, 0.01), ElementsAre(0, 0, 1, 1)) << "1010 | 990 us: 0.8 % more for a step";
  EXPECT_THAT(plan(30, 0.01), ElementsAre(0, 1, 1, 1)) << "1030 | 970 us: 2.3 % more";
}

TEST(Partition, StagesMayStayEmptyOnRequest) {
  GraphBuilder b;
  b.grad_mode = false;
  b.output(b.op("aten::relu", {b.input(ones(2, 2))}));
  EXPECT_THROW(partition(b.graph(), PartitionOptions(3)), PartitionError);
  const Plan plan = partition(b.graph(), PartitionOptions(3).allow_empty_stages(true));
  EXPECT_EQ(plan.stage_of_operator.size(), 1u);
  EXPECT_EQ(plan.stages(), 3);
}

// ---- Errors ----------------------------------------------------------------------------------

TEST(Errors, TooFewPieces) {
  GraphBuilder b = written_by_a_view();
  EXPECT_EQ(
      error_of<PartitionError>([&] { partition(b.graph(), PartitionOptions(4)); }),
      "[smp] cannot divide 3 operators into 4 stages: at most 2 are possible, since 1 of the 2 "
      "cuts "
      "between them are illegal, the first of these 1|2: operator 2 (aten::relu_) writes the "
      "storage that %1 and %2 share, and both are used after the cut. Ask for fewer stages "
      "(\"partitions\"; of smp_plan --stages), or change what keeps operators together: let one "
      "that works "
      "in place return a new tensor, or differentiate (autograd::grad) with respect to a later "
      "one.");
  b.graph().operators.pop_back();
  EXPECT_THAT(error_of<PartitionError>([&] { partition(b.graph(), PartitionOptions(3)); }),
              HasSubstr("cannot divide 2 operators into 3 stages: at most 2 are possible, since a "
                        "stage has at least one. Ask for fewer stages "
                        "(\"partitions\"; of smp_plan --stages)."));
}

TEST(Errors, OwnersThatLeaveNoRoom) {
  Chain chain(3);
  EXPECT_EQ(error_of<PartitionError>([&] {
              partition(chain.b.graph(), PartitionOptions(3).owner(Owners{{"fc0.weight", 2}}));
            }),
            "[smp] cannot keep the pins: parameter \"fc0.weight\" belongs to partition 2, where "
            "operator 0 (aten::t) must run, with too few operators before it for the 2 earlier "
            "partitions. Pin it elsewhere, or ask for fewer partitions.");
  EXPECT_EQ(error_of<PartitionError>([&] {
              partition(chain.b.graph(), PartitionOptions(2).owner(Owners{{"fc0.weight", 5}}));
            }),
            "[smp] cannot partition: parameter \"fc0.weight\" belongs to partition 5, where "
            "operator 0 (aten::t) must run, but the partitions are 0 to 1. Use as many partitions "
            "as for the first step function.");
}

TEST(Errors, MemoryLimit) {
  Chain chain(4);  // 64 bytes a weight, of which training needs four times as much
  graph::Graph& graph = chain.b.graph();
  for (graph::Operator& op : graph.operators) op.cost.saved_bytes = op.reads_parameter ? 0 : 10;
  const auto options = PartitionOptions(2).step(StepModel(4).active_microbatches(4));
  const auto limited = [&](int64_t bytes) {
    return PartitionOptions(options).step(StepModel(options.step()).memory_limit(bytes));
  };
  const std::string text = error_of<PartitionError>([&] { partition(graph, limited(500)); });
  EXPECT_THAT(text, HasSubstr("[smp] no division into 2 partitions keeps the memory limit of 500 B "
                              "(500 bytes): the least limit that would do is "));
  EXPECT_THAT(text, HasSubstr("weights 128 B, gradients 128 B, optimizer state 256 B, "
                              "activations of 3 microbatches"));
  EXPECT_THAT(text, HasSubstr("Raise \"memory_limit_mb\", use more partitions"));
  const std::string least = "would do is ";
  const int64_t bytes = std::stoll(text.substr(text.find(least) + least.size()));
  EXPECT_THROW(partition(graph, limited(bytes - 1)), PartitionError);
  const Prediction fits = predict(graph, partition(graph, limited(bytes)), options.step());
  EXPECT_EQ(*std::max_element(fits.rank_memory.begin(), fits.rank_memory.end()), bytes)
      << "the memory that the solver reckons with is that of the finished plan";
}

/// The error names the least limit, and the plan under it needs that much.
void expect_exact_limit(const graph::Graph& graph, const StepModel& step) {
  const auto limited = [&](int64_t bytes) {
    return PartitionOptions(2).step(StepModel(step).memory_limit(bytes));
  };
  const std::string text = error_of<PartitionError>([&] { partition(graph, limited(1)); });
  const std::string least = "would do is ";
  ASSERT_THAT(text, HasSubstr(least));
  const int64_t bytes = std::stoll(text.substr(text.find(least) + least.size()));
  EXPECT_THROW(partition(graph, limited(bytes - 1)), PartitionError);
  const Prediction fits = predict(graph, partition(graph, limited(bytes)), step);
  EXPECT_EQ(*std::max_element(fits.rank_memory.begin(), fits.rank_memory.end()), bytes);
}

TEST(Partition, TheMemoryLimitCountsCastsAndMessages) {
  Chain chain(5, 128);
  graph::Graph& graph = chain.b.graph();
  for (graph::Operator& op : graph.operators) op.cost.saved_bytes = op.reads_parameter ? 0 : 10;
  const auto step = StepModel(4).active_microbatches(4);
  expect_exact_limit(graph, StepModel(step).messages(3));
  for (graph::Operator& op : graph.operators) op.mode.autocast_cpu = true;
  expect_exact_limit(graph, step);
  expect_exact_limit(graph, StepModel(step).messages(3));
}

/// The search reckons with the units of the whole graph, and those of a plan's ranks may need more.
TEST(Partition, UnderTheLimitThatAnErrorNamesThereIsAPlan) {
  GraphBuilder b;
  Ref x = b.input(at::ones({1}));
  int index = 0;
  for (const int64_t elements : {39, 141, 170, 189, 64, 93, 12, 40, 145, 44, 102, 163, 198, 194}) {
    const Ref weight = b.parameter("p" + std::to_string(index++), at::ones({elements}));
    x = b.op("aten::sum", {b.op("aten::mul.Tensor", {x, weight}), c10::IValue()});
    b.cost(static_cast<double>(elements));
  }
  b.backward(x);
  const auto step =
      StepModel(4).optimizer_state(0).sharding(ReplicaSharding().parameters(8)).replicas(8);
  const auto with_limit = [&](int64_t bytes) {
    return partition(b.graph(), PartitionOptions(2).step(StepModel(step).memory_limit(bytes)));
  };
  const std::string least = "the least limit that would do is ";
  int64_t told = 0;
  for (int64_t limit = 1; told == 0 || limit < told; limit += 50) {
    const std::string text = error_of<PartitionError>([&] { with_limit(limit); });
    ASSERT_THAT(text, HasSubstr(least)) << limit;
    told = std::stoll(text.substr(text.find(least) + least.size()));
  }
  for (int64_t limit = told; limit < 2 * told; limit += 10) {
    const auto memory = predict(b.graph(), with_limit(limit), step).rank_memory;
    EXPECT_LE(*std::max_element(memory.begin(), memory.end()), limit);
  }
}

/// The same that `graph::WeightCasts` makes in a step: by memory and layout.
TEST(WeightCasts, AreSharedByViewsOfOneLayout) {
  GraphBuilder b;
  const Ref x = b.input(at::ones({2, 128}));
  const Ref weight = b.parameter("w", at::ones({128, 256}));
  const auto product = [&](Ref matrix) {
    b.op("aten::matmul", {x, matrix});
    b.graph().operators.back().mode.autocast_cpu = true;
    return static_cast<int>(b.graph().operators.size()) - 1;
  };
  const auto transposed_twice = [&] { return b.op("aten::t", {b.op("aten::t", {weight})}); };
  const int direct = product(weight);
  const int view = product(transposed_twice());
  const int other_view = product(transposed_twice());
  const int left = product(b.op("aten::narrow", {weight, 1, 0, 128}));
  const int right = product(b.op("aten::narrow", {weight, 1, 128, 128}));
  std::map<std::vector<int>, int64_t> bytes;
  for (const WeightCast& cast : weight_casts(b.graph())) bytes[cast.operators] = cast.bytes;
  const std::map<std::vector<int>, int64_t> expected = {{{direct, view, other_view}, 2 * 128 * 256},
                                                        {{left}, 2 * 128 * 128},
                                                        {{right}, 2 * 128 * 128}};
  EXPECT_EQ(bytes, expected);
}

TEST(Partition, TheMemoryLimitMovesTheCut) {
  Chain chain(4);
  graph::Graph& graph = chain.b.graph();
  graph.operators[0].cost.saved_bytes = graph.operators[2].cost.saved_bytes = 4000;
  auto options =
      PartitionOptions(2).memory_weight(0).step(StepModel(8).interleaved(false).optimizer_state(0));
  EXPECT_THAT(partition(graph, options).stage_of_operator, ElementsAre(0, 0, 0, 0, 1, 1, 1, 1, 1));
  options.step().memory_limit(8 * 4000 + 2000);
  EXPECT_THAT(partition(graph, options).stage_of_operator, ElementsAre(0, 0, 1, 1, 1, 1, 1, 1, 1))
      << "eight microbatches of 4000 bytes each on both, not twice that on the first";
}

TEST(Errors, Options) {
  Chain chain(1);
  EXPECT_THAT(error_of<ConfigError>([&] { partition(chain.b.graph(), PartitionOptions(0)); }),
              HasSubstr("partitions: expected at least 1, got 0"));
  EXPECT_THAT(error_of<ConfigError>(
                  [&] { partition(chain.b.graph(), PartitionOptions(1).memory_weight(1.5)); }),
              HasSubstr("memory_weight: expected a number from 0 (time only) to 1 (memory only), "
                        "got 1.5"));
  EXPECT_THAT(
      error_of<ConfigError>([&] { partition(chain.b.graph(), PartitionOptions(1).tolerance(-1)); }),
      HasSubstr("partition: tolerance: expected at least 0, got -1."));
}

TEST(Partition, IsDeterministic) {
  Chain a(9), b(9);
  EXPECT_EQ(partition(a.b.graph(), PartitionOptions(4)).to_string(),
            partition(b.b.graph(), PartitionOptions(4)).to_string());
}

/// Prints times.
TEST(Partition, ManyOperatorsIntoSixtyFourStages) {
  for (const int layers : {50, 500, 5000}) {
    Chain chain(layers, 2);
    const int stages = layers == 50 ? 8 : 64;
    const auto start = std::chrono::steady_clock::now();
    const Plan plan =
        partition(chain.b.graph(), PartitionOptions(stages).step(StepModel(2 * stages)));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::cout << chain.b.graph().operators.size() << " operators, " << stages
              << " stages: " << seconds.count() << " s\n";
    EXPECT_EQ(plan.stage_of_operator.back(), stages - 1);
  }
}

// ---- Noise -----------------------------------------------------------------------------------

/// A chain whose layers take 100 to 300 us, on purpose not all alike.
Chain uneven_chain(int layers) {
  Chain chain(layers);
  for (size_t i = 0; i < chain.b.graph().operators.size(); ++i) {
    graph::Cost& cost = chain.b.graph().operators[i].cost;
    if (cost.forward_us == 0) continue;
    cost.forward_us = 100.0 + 50.0 * static_cast<double>(i * 7 % 5);
    cost.backward_us = 2 * cost.forward_us;
  }
  return chain;
}

/// Every time up to 3 % off, as a busy machine measures it, and rounded to two digits.
Graph perturbed(const Graph& graph, unsigned seed) {
  Graph result = graph;
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> noise(0.97, 1.03);
  const auto measure = [&](double us) { return std::round(us * noise(random) / 10) * 10; };
  for (graph::Operator& op : result.operators) {
    op.cost.forward_us = measure(op.cost.forward_us);
    op.cost.backward_us = measure(op.cost.backward_us);
  }
  return result;
}

TEST(Stability, ThePreviousPlanIsKeptUnderNoise) {
  int moved_without = 0;
  for (const int stages : {2, 4, 8}) {
    Chain chain = uneven_chain(40);
    const Graph& graph = chain.b.graph();
    const auto options = PartitionOptions(stages).memory_weight(0).step(StepModel(8));
    const auto first = std::make_shared<const Plan>(partition(graph, options));
    for (unsigned seed = 0; seed < 100; ++seed) {
      const Graph noisy = perturbed(graph, seed);
      const Plan kept = partition(noisy, PartitionOptions(options).previous(first));
      ASSERT_EQ(kept.stage_of_operator, first->stage_of_operator) << stages << " " << seed;
      moved_without +=
          partition(noisy, options).stage_of_operator != first->stage_of_operator ? 1 : 0;
    }
  }
  std::cout << moved_without << " of 300 plans change if no previous plan is given\n";
}

TEST(Stability, AClearlyBetterPlanReplacesThePrevious) {
  Chain chain(4);
  const auto options = PartitionOptions(2).memory_weight(0).step(StepModel(8));
  const auto first = std::make_shared<const Plan>(partition(chain.b.graph(), options));
  for (const int matmul : {1, 3}) chain.b.graph().operators[matmul].cost.forward_us = 1000;
  const Plan now = partition(chain.b.graph(), PartitionOptions(options).previous(first));
  EXPECT_THAT(now.stage_of_operator, ElementsAre(0, 0, 1, 1, 1, 1, 1, 1, 1));
}

TEST(Stability, EqualBlocksAreDividedAlikeWithoutAPreviousPlan) {
  Chain chain(8);
  for (graph::Operator& op : chain.b.graph().operators) {
    op.cost.forward_us *= 20;
    op.cost.backward_us *= 20;
  }
  for (const int stages : {2, 4}) {
    const auto options = PartitionOptions(stages).memory_weight(0).step(StepModel(8));
    const Plan first = partition(chain.b.graph(), options);
    for (unsigned seed = 0; seed < 100; ++seed) {
      ASSERT_EQ(partition(perturbed(chain.b.graph(), seed), options).stage_of_operator,
                first.stage_of_operator);
    }
  }
}

}  // namespace
}  // namespace smp::partitioner::testing
