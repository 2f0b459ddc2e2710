#include "partitioner/partition.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <optional>
#include <random>
#include <set>
#include <tuple>

#include "partitioner/complete.h"
#include "partitioner/cost.h"
#include "partitioner/cuts.h"
#include "partitioner/data_flow.h"
#include "partitioner/verify.h"
#include "smp/core/error.h"
#include "tests/partitioner/error_of.h"
#include "tests/partitioner/random_graph.h"

namespace smp::partitioner::testing {
namespace {

using graph::Graph;
using graph::ValueId;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

at::Tensor ones(int64_t rows, int64_t columns) { return at::ones({rows, columns}); }

// ---- Against brute force -------------------------------------------------------------------

/// All that counts when plans are compared, taken from the finished plan.
struct Score {
  bool splits_weight = false;
  int64_t foreign = 0, peak = 0, bytes = 0;
  std::vector<int> stages;
};

/// Each result once for every stage that uses it after the one that makes it.
int64_t crossing_bytes(const Graph& graph, const std::vector<int>& stages) {
  const std::vector<std::vector<int>> uses = value_uses(graph);
  int64_t bytes = 0;
  for (size_t v = 0; v < uses.size(); ++v) {
    if (graph.values[v].producer < 0) continue;
    std::set<int> later;
    for (int index : uses[v]) later.insert(stages[index]);
    later.erase(stages[graph.values[v].producer]);
    bytes += static_cast<int64_t>(later.size()) * graph.values[v].meta.nbytes();
  }
  return bytes;
}

std::optional<Score> score(const Graph& graph, const std::vector<int>& stages, int count,
                           const Owners& owner) {
  Plan plan = complete_plan(graph, one_stage_per_rank(count), stages, owner);
  plan.reason_of_operator.resize(stages.size());
  if (error_of([&] { verify_plan(graph, plan); }) != "no error") return std::nullopt;
  Score score;
  // "Earliest cuts" is "largest stages, compared from the first operator on".
  for (int stage : stages) score.stages.push_back(-stage);
  const std::vector<ValueId> weights = split_weights(graph);
  for (size_t i = 0; i + 1 < stages.size(); ++i) {
    score.splits_weight |= stages[i] != stages[i + 1] && weights[i] != graph::kUndefined;
  }
  const std::vector<double> costs = operator_costs(graph, 0.5);
  std::vector<int64_t> of_stage(count, 0);
  for (size_t i = 0; i < stages.size(); ++i) of_stage[stages[i]] += std::llround(costs[i] * 1e12);
  score.peak = *std::max_element(of_stage.begin(), of_stage.end());
  score.bytes = crossing_bytes(graph, stages);
  for (const Replica& r : plan.replicas) {
    const graph::Value& value = graph.values[r.value];
    if (owner.count(value.name) != 0) score.foreign += value.meta.nbytes();
  }
  return score;
}

/// The best of all assignments of operators to stages that pass `verify_plan`.
std::optional<std::vector<int>> brute_force(const Graph& graph, int count, const Owners& owner) {
  std::optional<Score> best;
  std::vector<int> stages(graph.operators.size(), 0);
  const std::function<void(size_t)> visit = [&](size_t next) {
    if (next == stages.size()) {
      if (stages.back() != count - 1) return;
      const std::optional<Score> s = score(graph, stages, count, owner);
      const auto key = [](const Score& x) {
        return std::tie(x.splits_weight, x.foreign, x.peak, x.bytes, x.stages);
      };
      if (s && (!best || key(*s) < key(*best))) best = s;
      return;
    }
    for (int step : {0, 1}) {
      stages[next] = stages[next - 1] + step;
      if (stages[next] < count) visit(next + 1);
    }
  };
  visit(1);
  if (!best) return std::nullopt;
  for (int& stage : best->stages) stage = -stage;
  return best->stages;
}

TEST(Partition, EqualsBruteForceOnRandomPrograms) {
  std::mt19937 random(3);
  int possible = 0, impossible = 0, with_owners = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    RandomProgram program(seed);
    Graph& graph = program.graph();
    for (graph::Operator& op : graph.operators) {
      op.cost.forward_us = static_cast<double>(random() % 4);
      op.cost.saved_bytes = static_cast<int64_t>(random() % 3);
    }
    const int stages = 2 + static_cast<int>(random() % 3);
    Owners owner;
    if (seed % 2 == 0) {
      for (const char* name : {"t0", "t1", "t2"}) {
        if (random() % 2 == 0) owner[name] = static_cast<int>(random() % stages);
      }
    }
    const auto expected = brute_force(graph, stages, owner);
    const auto options = PartitionOptions(stages).memory_weight(0.5).tolerance(0).owner(owner);
    if (!expected) {
      ++impossible;
      EXPECT_THROW(partition(graph, options), PartitionError) << "seed " << seed;
      continue;
    }
    ++possible;
    with_owners += owner.empty() ? 0 : 1;
    ASSERT_EQ(partition(graph, options).stage_of_operator, *expected) << "seed " << seed << "\n"
                                                                      << graph.to_string();
  }
  std::cout << possible << " possible (" << with_owners << " with owners), " << impossible
            << " impossible\n";
  EXPECT_GT(possible, 100);
  EXPECT_GT(with_owners, 30);
  EXPECT_GT(impossible, 50);
}

// ---- Models ----------------------------------------------------------------------------------

/// A chain of linear layers that trains, "fc0" to "fc<n-1>", each in 10 us.
struct Chain {
  GraphBuilder b;
  std::vector<Ref> weights, results;

  explicit Chain(int layers, int64_t width = 4) {
    for (int i = 0; i < layers; ++i) {
      weights.push_back(b.parameter(name(i) + ".weight", ones(width, width)));
    }
    Ref x = b.input(ones(2, width));
    for (int i = 0; i < layers; ++i) {
      b.scope = name(i);
      x = layer(x, weights[i]);
      results.push_back(x);
    }
    b.scope = "";
    x = b.op("aten::mean", {x, c10::IValue()});
    b.backward(x);
    b.output(x);
  }

  Ref layer(Ref x, Ref weight) {
    const Ref y = b.op("aten::matmul", {x, b.op("aten::t", {weight})});
    b.cost(10, 20);
    return y;
  }

  static std::string name(int i) { return "fc" + std::to_string(i); }
};

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

TEST(Partition, ToleranceBuysFewerBytes) {
  GraphBuilder b;
  b.grad_mode = false;
  Ref x = b.op("aten::relu", {b.input(ones(8, 8))});
  b.cost(100);
  x = b.op("aten::sum.dim_IntList",
           {x, c10::IValue(std::vector<int64_t>{0}), false, c10::IValue()});
  b.cost(0.5);
  b.output(b.op("aten::relu", {x}));
  b.cost(100);
  const auto options = PartitionOptions(2).memory_weight(0).tolerance(0);
  EXPECT_THAT(partition(b.graph(), options).stage_of_operator, ElementsAre(0, 0, 1))
      << "the costs tie, the bytes decide";
  b.graph().operators[2].cost.forward_us = 99;
  EXPECT_THAT(partition(b.graph(), options).stage_of_operator, ElementsAre(0, 1, 1));
  EXPECT_THAT(
      partition(b.graph(), PartitionOptions(2).memory_weight(0).tolerance(0.01)).stage_of_operator,
      ElementsAre(0, 0, 1))
      << "0.5% more time sends 32 bytes instead of 256";
}

/// skip = op 0; then four operators, of which those in `users` add the skip again.
GraphBuilder skip_graph(const std::vector<int>& users, Ref& skip) {
  GraphBuilder b;
  const Ref w = b.parameter("w", ones(2, 2));
  skip = b.op("aten::mul.Tensor", {b.input(ones(2, 2)), w});
  b.cost(10);
  Ref x = skip;
  for (int i = 1; i < 4; ++i) {
    const bool user = std::find(users.begin(), users.end(), i) != users.end();
    x = b.op("aten::add.Tensor", {x, user ? skip : x, 1});
    b.cost(10);
  }
  b.backward(x);
  b.output(x);
  return b;
}

std::vector<Transfer> transfers_of(const Plan& plan, Ref value) {
  std::vector<Transfer> result;
  for (const Transfer& transfer : plan.transfers) {
    if (transfer.value == value.id) result.push_back(transfer);
  }
  return result;
}

TEST(Transfers, ASkipTravelsAlongTheStagesThatUseIt) {
  Ref skip;
  GraphBuilder b = skip_graph({3}, skip);
  const PartitionOptions four = PartitionOptions(4).memory_weight(0);
  EXPECT_THAT(transfers_of(partition(b.graph(), four), skip),
              ElementsAre(Transfer{skip.id, 0, 1, true}, Transfer{skip.id, 1, 3, true}))
      << "stage 2 does not see it";
  b = skip_graph({2, 3}, skip);
  EXPECT_THAT(transfers_of(partition(b.graph(), four), skip),
              ElementsAre(Transfer{skip.id, 0, 1, true}, Transfer{skip.id, 1, 2, true},
                          Transfer{skip.id, 2, 3, true}));
  const Plan three = partition(b.graph(), PartitionOptions(3).memory_weight(0));
  EXPECT_THAT(three.stage_of_operator, ElementsAre(0, 1, 2, 2))
      << "(0, 0, 1, 2) costs the same but sends four tensors instead of three";
  EXPECT_THAT(transfers_of(three, skip),
              ElementsAre(Transfer{skip.id, 0, 1, true}, Transfer{skip.id, 1, 2, true}));
}

TEST(Transfers, AGradientComesBackOnlyFromWhereOneIs) {
  GraphBuilder b;
  const Ref x = b.op("aten::mul.Tensor", {b.input(ones(2, 2)), b.parameter("w", ones(2, 2))});
  const Ref detached = b.op("aten::detach", {x});
  const Ref loss = b.op("aten::sum", {x, c10::IValue()});
  b.grad_mode = false;
  const Ref metric = b.op("aten::add.Tensor", {x, detached, 1});
  b.backward(loss);
  b.output(metric);
  const Plan plan = complete_plan(b.graph(), one_stage_per_rank(3), {0, 0, 1, 2}, {});
  EXPECT_THAT(plan.transfers, ElementsAre(Transfer{x.id, 0, 1, true}, Transfer{x.id, 1, 2, false},
                                          Transfer{detached.id, 0, 2, false}));
}

TEST(Transfers, AValueWrittenThroughAViewRequiresGradFromThenOn) {
  GraphBuilder b;
  const Ref w = b.parameter("w", ones(1, 2));
  const Ref out = b.op("aten::relu", {b.input(ones(2, 2))});  // stage 0: no grad yet
  const Ref row = b.op("aten::slice.Tensor", {out, 0, 0, 1, 1});
  b.op("aten::copy_", {row, w, false});  // `out` requires grad from here
  const Ref loss = b.op("aten::sum", {out, c10::IValue()});
  b.backward(loss);
  b.output(loss);
  EXPECT_FALSE(b.graph().values[out.id].meta.requires_grad);
  EXPECT_THAT(complete_plan(b.graph(), one_stage_per_rank(2), {0, 1, 1, 1}, {}).transfers,
              ElementsAre(Transfer{out.id, 0, 1, false}));
  const Plan late = complete_plan(b.graph(), one_stage_per_rank(2), {0, 0, 0, 1}, {});
  EXPECT_THAT(late.transfers, ElementsAre(Transfer{out.id, 0, 1, true}));
  const Plan chain = complete_plan(b.graph(), one_stage_per_rank(3), {0, 1, 1, 2}, {});
  EXPECT_THAT(chain.transfers,
              ElementsAre(Transfer{out.id, 0, 1, false}, Transfer{out.id, 1, 2, true}));
}

TEST(Transfers, ARootIsBroughtToItsGradient) {
  GraphBuilder b;
  const Ref y = b.op("aten::mul.Tensor", {b.input(ones(2, 2)), b.parameter("w", ones(2, 2))});
  const Ref gradient = b.op("aten::ones_like", {y, c10::IValue(), c10::IValue(), c10::IValue(),
                                                c10::IValue(), c10::IValue()});
  b.backward(y, gradient);
  b.output(y);
  const Plan plan = partition(b.graph(), PartitionOptions(2));
  EXPECT_THAT(plan.stage_of_root, ElementsAre(1));
  EXPECT_THAT(plan.stage_of_output, ElementsAre(0));
  EXPECT_THAT(plan.transfers, ElementsAre(Transfer{y.id, 0, 1, true}));
}

TEST(Owners, ATiedWeightHasOneOwnerAndItsGradientReturnsStageByStage) {
  GraphBuilder b;
  const Ref tied = b.parameter("embed.weight", ones(2, 2));
  Ref x = b.input(ones(2, 2));
  for (int i = 0; i < 4; ++i) {
    b.grad_mode = i != 1;
    const Ref y = b.op("aten::matmul", {x, tied});
    b.cost(10);
    b.grad_mode = true;
    x = i == 1 ? b.op("aten::add.Tensor", {x, y, 1}) : y;
  }
  b.backward(x);
  b.output(x);
  const Plan plan = complete_plan(b.graph(), one_stage_per_rank(4), {0, 1, 1, 2, 3}, {});
  EXPECT_EQ(plan.owner, (Owners{{"embed.weight", 0}}));
  EXPECT_THAT(plan.replicas,
              ElementsAre(Replica{tied.id, 0, 1, 0, false}, Replica{tied.id, 0, 2, 0, true},
                          Replica{tied.id, 0, 3, 2, true}))
      << "stage 1 reads it without a gradient, so it has none to pass on";
}

TEST(Owners, AWrittenBufferBelongsToTheStageThatWritesIt) {
  GraphBuilder b;
  const Ref count = b.buffer("bn.count", at::ones({2, 2}));
  Ref x = b.op("aten::mul.Tensor", {b.input(ones(2, 2)), b.parameter("w", ones(2, 2))});
  b.cost(10);
  b.op("aten::add_.Scalar", {count, 1, 1});
  x = b.op("aten::add.Tensor", {x, count, 1});
  b.cost(10);
  b.backward(x);
  b.output(x);
  const Plan plan = partition(b.graph(), PartitionOptions(2).memory_weight(0));
  EXPECT_THAT(plan.stage_of_operator, ElementsAre(0, 1, 1));
  EXPECT_EQ(plan.owner.at("bn.count"), 1);
  EXPECT_TRUE(plan.replicas.empty());
  EXPECT_THAT(plan.reason_of_operator[2], HasSubstr("cut 1|2 illegal: buffer \"bn.count\" is "
                                                    "written by operator 1 (aten::add_.Scalar)"));
  EXPECT_THAT(error_of<PartitionError>([&] {
                partition(b.graph(), PartitionOptions(2).owner(Owners{{"bn.count", 0}}));
              }),
              HasSubstr("buffer \"bn.count\" belongs to stage 0"));
}

TEST(Owners, SettledOwnersMoveTheCuts) {
  Chain chain(4);
  const Owners late{{"fc0.weight", 0}, {"fc1.weight", 1}};
  const Plan plan = partition(chain.b.graph(), PartitionOptions(2).owner(late));
  EXPECT_THAT(plan.stage_of_operator, ElementsAre(0, 0, 1, 1, 1, 1, 1, 1, 1));
  EXPECT_EQ(plan.reason_of_operator[2], "owner of fc1.weight");
  const Plan again =
      partition(chain.b.graph(), PartitionOptions(2).owner(plan.owner).memory_weight(0));
  EXPECT_EQ(again.stage_of_operator, plan.stage_of_operator);
}

TEST(Owners, EvaluationFollowsTheOwnersWhateverTheBalance) {
  Chain training(6), evaluation(6);
  evaluation.b.graph().roots.clear();
  const Plan plan = partition(training.b.graph(), PartitionOptions(3));
  graph::Graph& graph = evaluation.b.graph();
  graph.operators[1].cost.forward_us = 1000;  // on balance alone the first cut would come earlier
  const Plan free = partition(graph, PartitionOptions(3));
  const Plan bound = partition(graph, PartitionOptions(3).owner(plan.owner));
  EXPECT_NE(free.stage_of_operator, plan.stage_of_operator);
  EXPECT_TRUE(bound.replicas.empty());
  EXPECT_EQ(bound.owner, plan.owner);
}

TEST(Owners, EvaluationInAnotherOrderMakesReplicas) {
  Chain chain(2);
  chain.b.graph().roots.clear();
  const Owners swapped{{"fc0.weight", 1}, {"fc1.weight", 0}};
  const Plan plan = partition(chain.b.graph(), PartitionOptions(2).owner(swapped));
  EXPECT_EQ(plan.owner, swapped);
  EXPECT_EQ(plan.replicas.size(), 1u) << "one stage runs both layers and has a replica of one";
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

// ---- Gradients against autograd --------------------------------------------------------------

TEST(Gradients, ComeBackWhereAutogradGivesOne) {
  int with = 0, without = 0;
  for (unsigned seed = 0; seed < 1500; ++seed) {
    RandomProgram program(seed, /*train=*/true);
    const Graph& graph = program.graph();
    if (graph.roots.empty()) continue;
    const std::vector<bool> legal = legal_cuts(graph);
    for (size_t i = 0; i < legal.size(); ++i) {
      if (!legal[i]) continue;
      std::vector<int> stages(graph.operators.size(), 0);
      std::fill(stages.begin() + static_cast<long>(i) + 1, stages.end(), 1);
      const Plan plan = complete_plan(graph, one_stage_per_rank(2), stages, {});
      const StagedRun run(graph, plan, program.initial());
      run.tensor(plan.stage_of_root[0], graph.roots[0].value).backward();
      for (const Transfer& transfer : plan.transfers) {
        const bool expected = run.entry(1, transfer.value).grad().defined();
        (expected ? with : without) += 1;
        ASSERT_EQ(transfer.needs_gradient, expected)
            << "seed " << seed << " cut " << i << " value " << transfer.value << "\n"
            << graph.to_string();
      }
    }
  }
  std::cout << with << " transfers with a gradient, " << without << " without\n";
  EXPECT_GT(with, 300);
  EXPECT_GT(without, 300);
}

// ---- Errors ----------------------------------------------------------------------------------

TEST(Errors, TooFewPieces) {
  GraphBuilder b;
  b.grad_mode = false;
  const Ref y = b.op("aten::relu", {b.input(ones(2, 2))});
  const Ref row = b.op("aten::select.int", {y, 0, 0});
  b.op("aten::relu_", {row});
  b.output(y);
  EXPECT_EQ(
      error_of<PartitionError>([&] { partition(b.graph(), PartitionOptions(4)); }),
      "[smp] cannot divide 3 operators into 4 stages: at most 2 are possible, since 1 of the 2 "
      "cuts "
      "between them are illegal, the first of these 1|2: operator 2 (aten::relu_) writes the "
      "storage that %1 and %2 share, and both are used after the cut. Ask for fewer stages "
      "(\"pipeline_parallel_degree\") or replace operators that work in place by ones that return "
      "a new tensor.");
  b.graph().operators.pop_back();
  EXPECT_THAT(error_of<PartitionError>([&] { partition(b.graph(), PartitionOptions(3)); }),
              HasSubstr("at most 2 are possible, since every cut between them is legal"));
}

TEST(Errors, OwnersInTheWrongOrder) {
  Chain chain(3);
  const Owners swapped{{"fc0.weight", 1}, {"fc2.weight", 0}};
  EXPECT_EQ(error_of<PartitionError>(
                [&] { partition(chain.b.graph(), PartitionOptions(2).owner(swapped)); }),
            "[smp] cannot keep the owners that an earlier step function settled: parameter "
            "\"fc2.weight\" belongs to stage 0, where operator 4 (aten::t) must run, but parameter "
            "\"fc0.weight\" belongs to stage 1, where operator 0 (aten::t) must run; no legal cuts "
            "leave both where they belong. Call the step function that uses the parameters in this "
            "order first.");
  EXPECT_THAT(error_of<PartitionError>([&] {
                partition(chain.b.graph(), PartitionOptions(3).owner(Owners{{"fc0.weight", 2}}));
              }),
              HasSubstr("parameter \"fc0.weight\" belongs to stage 2, where operator 0 (aten::t) "
                        "must run, with too few operators before it for the 2 earlier stages"));
  EXPECT_THAT(error_of<PartitionError>([&] {
                partition(chain.b.graph(), PartitionOptions(2).owner(Owners{{"fc0.weight", 5}}));
              }),
              HasSubstr("parameter \"fc0.weight\" belongs to stage 5, but the stages are 0 to 1"));
}

TEST(Errors, Options) {
  Chain chain(1);
  EXPECT_THAT(error_of<ConfigError>([&] { partition(chain.b.graph(), PartitionOptions(0)); }),
              HasSubstr("stages: expected at least 1, got 0"));
  EXPECT_THAT(error_of<ConfigError>(
                  [&] { partition(chain.b.graph(), PartitionOptions(1).memory_weight(1.5)); }),
              HasSubstr("memory_weight: expected a number from 0 (time only) to 1 (memory only), "
                        "got 1.5"));
}

TEST(Partition, IsDeterministic) {
  Chain a(9), b(9);
  EXPECT_EQ(partition(a.b.graph(), PartitionOptions(4)).to_string(),
            partition(b.b.graph(), PartitionOptions(4)).to_string());
}

/// Prints the time.
TEST(Partition, TenThousandOperatorsIntoSixtyFourStages) {
  Chain chain(5000, 2);
  const auto start = std::chrono::steady_clock::now();
  const Plan plan = partition(chain.b.graph(), PartitionOptions(64));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::cout << chain.b.graph().operators.size() << " operators: " << seconds.count() << " s\n";
  EXPECT_EQ(plan.stage_of_operator.back(), 63);
}

}  // namespace
}  // namespace smp::partitioner::testing

int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
