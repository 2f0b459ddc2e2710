// SPDX-License-Identifier: Apache-2.0
#include "partitioner/order.h"

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "core/check.h"
#include "partitioner/best_order.h"
#include "partitioner/cost.h"
#include "partitioner/plan_file.h"
#include "partitioner/verify.h"
#include "tests/error_of.h"
#include "tests/partitioner/random_graph.h"

namespace smp::partitioner::testing {
namespace {

using graph::Graph;
using graph::ValueId;
using smp::testing::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Kind = OrderRule::Kind;

at::Tensor ones(int64_t size) { return at::ones({size, size}); }

/// Pairs of operators that a kind of rule orders.
std::set<std::pair<int, int>> pairs(const Graph& graph, Kind kind) {
  std::set<std::pair<int, int>> result;
  for (const OrderRule& rule : order_rules(graph)) {
    if (rule.kind == kind) result.insert({rule.before, rule.after});
  }
  return result;
}

using Pairs = std::set<std::pair<int, int>>;

// ---- Rules ---------------------------------------------------------------------------------

TEST(OrderRules, DataAndWrites) {
  GraphBuilder b;
  const Ref x = b.input(ones(2));
  const Ref y = b.op("aten::relu", {x});   // 0
  const Ref view = b.op("aten::t", {y});   // 1
  const Ref z = b.op("aten::relu", {x});   // 2: independent
  b.op("aten::add_.Tensor", {y, z, 1});    // 3: writes the memory that 1 sees
  b.op("aten::mul.Tensor", {view, view});  // 4
  EXPECT_EQ(pairs(b.graph(), Kind::kData), (Pairs{{0, 1}, {0, 3}, {1, 4}, {2, 3}}));
  EXPECT_EQ(pairs(b.graph(), Kind::kStorage), (Pairs{{0, 1}, {1, 3}, {3, 4}}));
  EXPECT_EQ(why_illegal_order(b.graph(), {2, 0, 1, 3, 4}), std::nullopt);
  EXPECT_EQ(
      why_illegal_order(b.graph(), {0, 1, 3, 2, 4}),
      "operator 3 (aten::add_.Tensor) runs before operator 2 (aten::relu), whose result it reads");
  EXPECT_EQ(why_illegal_order(b.graph(), {0, 1, 2, 4, 3}),
            "operator 4 (aten::mul.Tensor) runs before operator 3 (aten::add_.Tensor), but both "
            "use a storage "
            "that is written, that of %1");
  EXPECT_EQ(why_illegal_order(b.graph(), {0, 1, 2, 3}),
            "it does not name each of the 5 operators once");
  EXPECT_EQ(why_illegal_order(b.graph(), {0, 1, 2, 3, 3}),
            "it does not name each of the 5 operators once");
}

TEST(OrderRules, BuffersThatAreWritten) {
  GraphBuilder b;
  const Ref x = b.input(ones(2)), written = b.buffer("written", ones(2));
  const Ref read = b.buffer("read", ones(2));
  b.op("aten::mul.Tensor", {x, written});      // 0
  b.op("aten::mul.Tensor", {x, read});         // 1
  b.op("aten::add_.Tensor", {written, x, 1});  // 2
  b.op("aten::mul.Tensor", {x, read});         // 3
  EXPECT_EQ(pairs(b.graph(), Kind::kStorage), (Pairs{{0, 2}}));
}

TEST(OrderRules, GradientsAreAddedInTheOrderOfTheProgram) {
  GraphBuilder b;
  const Ref x = b.input(ones(2)), w = b.parameter("w", ones(2));
  const Ref a = b.op("aten::mul.Tensor", {x, w});     // 0
  const Ref same = b.op("aten::contiguous", {w, 0});  // 1: returns its argument
  ASSERT_TRUE(b.tensor(same).is_same(b.tensor(w)));
  const Ref c = b.op("aten::mul.Tensor", {x, same});  // 2
  b.grad_mode = false;
  const Ref metric = b.op("aten::mul.Tensor", {x, w});  // 3: no gradient
  b.grad_mode = true;
  const Ref d = b.op("aten::mul.Tensor", {x, w});  // 4
  const Ref sum = b.op("aten::add.Tensor", {a, c, 1});
  const Ref total = b.op("aten::add.Tensor", {sum, d, 1});
  b.backward(b.op("aten::sum", {total, c10::IValue()}));
  b.output(metric);
  Pairs of_weight;
  for (const OrderRule& rule : order_rules(b.graph())) {
    if (rule.kind == Kind::kGradient && rule.value == w.id) {
      of_weight.insert({rule.before, rule.after});
    }
  }
  EXPECT_EQ(of_weight, (Pairs{{0, 1}, {1, 2}, {2, 4}}));
  EXPECT_EQ(why_illegal_order(b.graph(), {3, 0, 1, 2, 4, 5, 6, 7}), std::nullopt);
  EXPECT_EQ(why_illegal_order(b.graph(), {0, 4, 1, 2, 3, 5, 6, 7}),
            "operator 4 (aten::mul.Tensor) runs before operator 2 (aten::mul.Tensor), but the "
            "gradient of "
            "parameter \"w\" is the sum of theirs in this order");
}

// ---- Against execution ---------------------------------------------------------------------

/// The results of a graph that runs in a certain order in one process.
struct Outcome {
  std::vector<at::Tensor> values;     ///< at the end
  std::vector<at::Tensor> gradients;  ///< gradients of the tensors that were there before

  bool operator==(const Outcome& other) const {
    return std::equal(values.begin(), values.end(), other.values.begin(), same) &&
           std::equal(gradients.begin(), gradients.end(), other.gradients.begin(), same);
  }

  static bool same(const at::Tensor& a, const at::Tensor& b) {
    return a.defined() == b.defined() && (!a.defined() || a.equal(b));
  }
};

Outcome run(const Graph& graph, const std::vector<int>& order,
            const std::vector<at::Tensor>& initial) {
  std::vector<at::Tensor> leaves, tensors(graph.values.size());
  for (size_t v = 0; v < initial.size(); ++v) {
    leaves.push_back(initial[v].detach().clone().set_requires_grad(initial[v].requires_grad()));
    tensors[v] = leaves[v].clone();  // in-place operators refuse leaves
  }
  for (int index : order) {
    const graph::Operator& op = graph.operators[index];
    const at::AutoGradMode mode(op.mode.grad);
    torch::jit::Stack stack = make_stack(op.arguments, tensors);
    op.handle.callBoxed(stack);
    for (size_t r = 0; r < op.results.size(); ++r) tensors[op.results[r]] = stack[r].toTensor();
  }
  for (const graph::BackwardRoot& root : graph.roots) tensors[root.value].backward();
  Outcome outcome;
  for (const at::Tensor& leaf : leaves) outcome.gradients.push_back(leaf.grad());
  const at::AutoGradMode no_grad(false);  // autograd refuses to look at some views
  for (const at::Tensor& tensor : tensors) outcome.values.push_back(tensor.detach());
  return outcome;
}

/// A random order that keeps these rules.
std::vector<int> random_order(size_t operators, const std::vector<OrderRule>& rules,
                              std::mt19937& random) {
  std::vector<int> missing(operators, 0), ready, order;
  for (const OrderRule& rule : rules) ++missing[rule.after];
  for (size_t op = 0; op < operators; ++op) {
    if (missing[op] == 0) ready.push_back(static_cast<int>(op));
  }
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    order.push_back(ready.back());
    ready.pop_back();
    for (const OrderRule& rule : rules) {
      if (rule.before == order.back() && --missing[rule.after] == 0) ready.push_back(rule.after);
    }
  }
  return order;
}

std::vector<OrderRule> without(std::vector<OrderRule> rules, Kind kind) {
  rules.erase(std::remove_if(rules.begin(), rules.end(),
                             [&](const OrderRule& rule) { return rule.kind == kind; }),
              rules.end());
  return rules;
}

/// A program and its inputs: random numbers, whose sums are not exact.
struct Subject {
  Graph graph;
  std::vector<at::Tensor> initial;
};

/// A program with views and in-place operators.
Subject random_program(int seed) {
  RandomProgram program(seed, /*train=*/true);
  at::manual_seed(seed);
  Subject subject{program.graph(), {}};
  for (const at::Tensor& tensor : program.initial()) {
    const auto numbers = at::randn(tensor.sizes());
    subject.initial.push_back(numbers.set_requires_grad(tensor.requires_grad()));
  }
  return subject;
}

/// A program with tensors that many operators use, whose gradients are sums of many.
Subject fan_out(int seed) {
  std::mt19937 random(seed);
  at::manual_seed(seed);
  GraphBuilder b;
  std::vector<Ref> live = {b.parameter("v", at::randn({4, 4})),
                           b.parameter("w", at::randn({4, 4}))};
  for (int i = 0; i < 12; ++i) {
    const Ref early = live[random() % std::min<size_t>(live.size(), 3)];
    const Ref any = live[random() % live.size()];
    live.push_back(random() % 2 == 0 ? b.op("aten::mul.Tensor", {early, any})
                                     : b.op("aten::matmul", {any, early}));
  }
  Ref total = live[0];
  for (size_t i = 1; i < live.size(); ++i) total = b.op("aten::add.Tensor", {total, live[i], 1});
  b.backward(b.op("aten::sum", {total, c10::IValue()}));
  Subject subject{b.graph(), {}};
  for (int v : {0, 1}) {
    subject.initial.push_back(b.tensor(live[v]).detach().clone().set_requires_grad(true));
  }
  return subject;
}

/// The results of running programs in random orders.
struct Differences {
  int reordered = 0;  ///< programs that ran in another order than their own
  int different = 0;  ///< programs that gave other bits, or an error
};

template <class Make, class Choose>
Differences run_in_random_orders(int programs, const Make& make, const Choose& choose) {
  Differences result;
  for (int seed = 0; seed < programs; ++seed) {
    const Subject subject = make(seed);
    std::vector<int> in_program(subject.graph.operators.size());
    std::iota(in_program.begin(), in_program.end(), 0);
    std::mt19937 random(seed);
    const auto order = random_order(in_program.size(), choose(order_rules(subject.graph)), random);
    result.reordered += order == in_program ? 0 : 1;
    const Outcome expected = run(subject.graph, in_program, subject.initial);
    try {
      result.different += run(subject.graph, order, subject.initial) == expected ? 0 : 1;
    } catch (const c10::Error&) {
      ++result.different;  // something was written that backward needs
    }
  }
  return result;
}

const auto kAll = [](const std::vector<OrderRule>& rules) { return rules; };

TEST(OrderRules, EveryLegalOrderGivesTheSameBits) {
  const Differences any = run_in_random_orders(3000, random_program, kAll);
  EXPECT_EQ(any.different, 0);
  EXPECT_GT(any.reordered, 1500);
  const Differences sums = run_in_random_orders(1000, fan_out, kAll);
  EXPECT_EQ(sums.different, 0);
  EXPECT_GT(sums.reordered, 500);
}

TEST(OrderRules, WithoutThemBitsDiffer) {
  EXPECT_GT(run_in_random_orders(1000, random_program,
                                 [](const auto& rules) { return without(rules, Kind::kStorage); })
                .different,
            100);
  EXPECT_GT(run_in_random_orders(1000, fan_out,
                                 [](const auto& rules) { return without(rules, Kind::kGradient); })
                .different,
            500);
}

// ---- The reordered graph ------------------------------------------------------------------

TEST(Reordered, PermutesOperatorsAndKeepsValues) {
  GraphBuilder b;
  const Ref x = b.input(ones(2));
  const Ref y = b.op("aten::relu", {x});
  const Ref z = b.op("aten::t", {x});
  b.output(b.op("aten::mul.Tensor", {y, z}));
  b.graph().operators[1].random_ordinal = 7;
  b.graph().operators[1].cost.forward_us = 3;
  const Graph graph = reordered(b.graph(), {1, 0, 2});
  EXPECT_EQ(graph.operators[0].name(), "aten::t");
  EXPECT_EQ(graph.operators[0].random_ordinal, 7);
  EXPECT_EQ(graph.operators[0].cost.forward_us, 3);
  EXPECT_EQ(graph.values[y.id].producer, 1);
  EXPECT_EQ(graph.values[z.id].producer, 0);
  EXPECT_EQ(graph.values[x.id].producer, -1);
  EXPECT_EQ(graph.outputs, b.graph().outputs);
  EXPECT_EQ(reordered(graph, {1, 0, 2}).to_string(), b.graph().to_string()) << "and back";
  EXPECT_EQ(reordered(b.graph(), {}).to_string(), b.graph().to_string());
}

TEST(Reordered, CountsWhatWasMoved) {
  EXPECT_EQ(moved_operators({}), 0);
  EXPECT_EQ(moved_operators({0, 1, 2}), 0);
  EXPECT_EQ(moved_operators({1, 2, 3, 0}), 1);
  EXPECT_EQ(moved_operators({0, 2, 4, 1, 3, 5}), 2);
}

// ---- The best order ------------------------------------------------------------------------

/// Layers of one or more towers, written layer by layer; each takes as long.
struct Towers {
  explicit Towers(int towers, int layers, int64_t size = 64, bool train = true) {
    const Ref x = b.input(ones(size));
    std::vector<Ref> y(towers, x);
    for (int layer = 0; layer < layers; ++layer) {
      for (int tower = 0; tower < towers; ++tower) {
        b.scope = std::string(1, static_cast<char>('a' + tower)) + std::to_string(layer);
        const auto weight = b.scope + ".weight";
        const Ref w = train ? b.parameter(weight, ones(size)) : b.frozen(weight, ones(size));
        y[tower] = add("aten::matmul", {y[tower], w});
      }
    }
    b.scope = "";
    Ref sum = y[0];
    for (int tower = 1; tower < towers; ++tower) {
      sum = b.op("aten::add.Tensor", {sum, y[tower], 1});
    }
    const Ref loss = b.op("aten::sum", {sum, c10::IValue()});
    b.output(loss);
    if (train) b.backward(loss);
  }

  Ref add(const char* name, const std::vector<Arg>& args) {
    const Ref result = b.op(name, args);
    b.cost(20, 40);
    return result;
  }

  GraphBuilder b;
};

PartitionOptions options_for(int partitions) {
  return PartitionOptions(partitions).memory_weight(0).step(StepModel(8));
}

int64_t crossing_bytes(const Graph& graph, const Plan& plan) {
  int64_t bytes = 0;
  for (const Transfer& transfer : plan.transfers)
    bytes += graph.values[transfer.value].meta.nbytes();
  return bytes;
}

TEST(BestOrder, OneTowerAfterTheOther) {
  Towers towers(2, 4);
  const Graph& graph = towers.b.graph();
  for (int stages : {2, 4}) {
    const Plan before = partition(graph, options_for(stages));
    const Plan plan = partition_in_best_order(graph, options_for(stages));
    EXPECT_EQ(why_illegal_order(graph, plan.order), std::nullopt);
    verify_plan(reordered(graph, plan.order), plan);
    EXPECT_LT(crossing_bytes(graph, plan), crossing_bytes(graph, before)) << stages << " stages";
  }
  const Plan plan = partition_in_best_order(graph, options_for(2));
  EXPECT_THAT(plan.order, ElementsAre(0, 2, 4, 6, 1, 3, 5, 7, 8, 9));
  EXPECT_EQ(plan.transfers.size(), 1u);
  EXPECT_THAT(plan.to_string(), HasSubstr("order 0, 2, 4, 6, 1, 3, 5, 7, 8, 9\n"));
}

TEST(BestOrder, ProgramOrderWhereNothingIsGained) {
  Towers one(1, 8);
  EXPECT_THAT(partition_in_best_order(one.b.graph(), options_for(4)).order, IsEmpty());
  EXPECT_EQ(partition_in_best_order(one.b.graph(), options_for(4)).to_string(),
            partition(one.b.graph(), options_for(4)).to_string());
  Towers small(2, 4, /*size=*/2);
  for (graph::Operator& op : small.b.graph().operators) op.cost = {5000, 10000, 0, 0};
  EXPECT_THAT(partition_in_best_order(small.b.graph(), options_for(2)).order, IsEmpty())
      << "less than 2 % of a step";
}

TEST(BestOrder, PinnedOperatorsStay) {
  Towers towers(2, 4);
  Graph& graph = towers.b.graph();
  EXPECT_THAT(partition_in_best_order(graph, options_for(2).pinned(Owners{{"b3.weight", 1}})).order,
              IsEmpty());
  EXPECT_THAT(partition_in_best_order(
                  graph, options_for(2).auto_partition(false).pinned(Owners{{"b3.weight", 1}}))
                  .order,
              IsEmpty());
  graph.operators.back().mode.partition = 1;
  EXPECT_THAT(partition_in_best_order(graph, options_for(2)).order, IsEmpty());
}

TEST(BestOrder, SharedWeightsKeepTowersTogether) {
  // Both towers use the same weights: one after the other, each stage would need all of them.
  GraphBuilder b;
  const Ref left = b.input(ones(64)), right = b.input(ones(64));
  std::vector<Ref> y = {left, right};
  for (int layer = 0; layer < 4; ++layer) {
    const Ref w = b.parameter("w" + std::to_string(layer), ones(64));
    for (Ref& tower : y) {
      tower = b.op("aten::matmul", {tower, w});
      b.cost(50, 100);
    }
  }
  const Ref sum = b.op("aten::add.Tensor", {y[0], y[1], 1});
  b.backward(b.op("aten::sum", {sum, c10::IValue()}));
  EXPECT_THAT(partition_in_best_order(b.graph(), options_for(2)).order, IsEmpty());
}

TEST(BestOrder, PreviousOrderIsKept) {
  Towers towers(2, 4);
  const Graph& graph = towers.b.graph();
  const auto previous =
      std::make_shared<const Plan>(partition_in_best_order(graph, options_for(2)));
  ASSERT_THAT(previous->order, Not(IsEmpty()));
  EXPECT_EQ(partition_in_best_order(graph, options_for(2).previous(previous)).to_string(),
            previous->to_string());
  const auto in_program = std::make_shared<const Plan>(partition(graph, options_for(2)));
  EXPECT_EQ(partition_in_best_order(graph, options_for(2).previous(in_program).keep(1)).to_string(),
            in_program->to_string());
  EXPECT_EQ(
      partition_in_best_order(graph, options_for(2).previous(in_program).keep(0.01)).to_string(),
      previous->to_string());
}

TEST(BestOrder, LaterGraphsFollowTheOwners) {
  Towers towers(2, 4);
  const Plan first = partition_in_best_order(towers.b.graph(), options_for(2));
  Owners owner;
  for (const auto& [name, stage] : first.owner) owner[name] = first.rank_of_stage[stage];
  EXPECT_THAT(order_by_owner(towers.b.graph(), owner), ElementsAre(0, 2, 4, 6, 1, 3, 5, 7, 8, 9));
  for (const bool train : {true, false}) {
    Towers later(2, 4, /*size=*/8, train);
    const auto options = options_for(2).owner(owner).allow_empty_stages(true);
    const Plan plan = partition_in_best_order(later.b.graph(), options);
    EXPECT_EQ(why_illegal_order(later.b.graph(), plan.order), std::nullopt);
    EXPECT_EQ(plan.stages(), 2) << "each rank is visited once";
    EXPECT_THAT(plan.replicas, IsEmpty()) << "and has what it reads";
    const Plan in_program = partition(later.b.graph(), options);
    EXPECT_TRUE(in_program.stages() > 2 || !in_program.replicas.empty()) << "unlike in the program";
  }
}

/// One rank's buffer is written, then the other's, then the first is read: no cut is legal between
/// the writes in the order of the program.
TEST(BestOrder, LaterGraphsLeaveAnOrderThatTheOwnersForbid) {
  GraphBuilder b;
  const Ref x = b.input(ones(2)), first = b.buffer("first", ones(2));
  const Ref second = b.buffer("second", ones(2));
  b.op("aten::add_.Tensor", {first, x, 1});        // 0
  b.op("aten::add_.Tensor", {second, x, 1});       // 1
  b.output(b.op("aten::mul.Tensor", {first, x}));  // 2
  const auto options = options_for(2).owner({{"first", 0}, {"second", 1}}).allow_empty_stages(true);
  EXPECT_THROW(partition(b.graph(), options), PartitionError);
  EXPECT_THAT(partition_in_best_order(b.graph(), options).order, ElementsAre(0, 2, 1));
}

TEST(BestOrder, LaterGraphsInProgramOrderStaySo) {
  Towers one(1, 6);
  const Plan first = partition_in_best_order(one.b.graph(), options_for(3));
  Owners owner;
  for (const auto& [name, stage] : first.owner) owner[name] = first.rank_of_stage[stage];
  EXPECT_THAT(order_by_owner(one.b.graph(), owner), IsEmpty());
}

TEST(BestOrder, RandomProgramsGetPlansThatVerify) {
  int reordered_plans = 0;
  for (int seed = 0; seed < 500; ++seed) {
    RandomProgram program(seed, /*train=*/true);
    Graph& graph = program.graph();
    estimate_costs(graph, nullptr);
    try {
      const Plan plan = partition_in_best_order(graph, options_for(2));
      if (plan.order.empty()) continue;
      ++reordered_plans;
      EXPECT_EQ(why_illegal_order(graph, plan.order), std::nullopt) << seed;
      verify_plan(reordered(graph, plan.order), plan);
    } catch (const PartitionError&) {
      continue;  // no legal cut
    }
  }
  EXPECT_GT(reordered_plans, 20);
}

// ---- Plan files ----------------------------------------------------------------------------

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(OrderInPlanFile, LoadsWhatWasSaved) {
  Towers towers(2, 4);
  const Graph& graph = towers.b.graph();
  const Plan plan = partition_in_best_order(graph, options_for(2));
  const std::string text = plan_to_json(graph, plan);
  EXPECT_THAT(text, HasSubstr(R"(      "partition": 0,
      "operators": "0, 2, 4, 6",
      "from": "aten::matmul in a0",
      "to": "aten::matmul in a3",
      "modules": "a0, a1, a2, a3"
)"));
  EXPECT_THAT(text, HasSubstr("\"operators\": \"1, 3, 5, 7-9\""));
  EXPECT_EQ(plan_from_json(graph, text, 2, "plan.json").to_string(), plan.to_string());
}

TEST(OrderInPlanFile, Errors) {
  Towers towers(2, 4);
  const Graph& graph = towers.b.graph();
  const std::string text = plan_to_json(graph, partition_in_best_order(graph, options_for(2)));
  const auto error = [&](const std::string& from, const std::string& to) {
    return error_of([&] { plan_from_json(graph, replaced(text, from, to), 2, "plan.json"); });
  };
  EXPECT_THAT(error("1, 3, 5, 7-9", "3, 1, 5, 7-9"), HasSubstr("stage 1 begins with operator 3"));
  EXPECT_THAT(error("1, 3, 5, 7-9", "1, 5, 3, 7-9"),
              HasSubstr("plan.json: the operators cannot run in this order: operator 5 "
                        "(aten::matmul) runs before operator 3 (aten::matmul), whose result it "
                        "reads. Move them to other stages, or delete the file to partition anew."));
  EXPECT_THAT(error("1, 3, 5, 7-9", "1, 3, 3, 7-9"),
              HasSubstr("it does not name each of the 10 operators once"));
  for (const char* wrong : {"1, 3, 5, 7-10", "1,3", "1, ", "7-", "5-3", "-1", "a"}) {
    EXPECT_THAT(error("1, 3, 5, 7-9", wrong),
                HasSubstr("plan.json: \"stages[1].operators\": expected operators from 0 to 9 like "
                          "\"0-3, 8, 9-12\", got \""))
        << wrong;
  }
}

}  // namespace
}  // namespace smp::partitioner::testing
