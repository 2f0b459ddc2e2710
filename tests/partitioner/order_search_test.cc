// SPDX-License-Identifier: Apache-2.0
#include "partitioner/order_search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <numeric>
#include <random>

namespace smp::partitioner {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int> program(int operators) {
  std::vector<int> order(operators);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

bool is_legal(const OrderProblem& problem, const std::vector<int>& order) {
  std::vector<int> position(problem.operators(), -1);
  for (size_t p = 0; p < order.size(); ++p) position[order[p]] = static_cast<int>(p);
  for (int op = 0; op < problem.operators(); ++op) {
    if (position[op] < 0) return false;
    for (int before : problem.before[op]) {
      if (position[before] > position[op]) return false;
    }
  }
  return order.size() == problem.weight.size();
}

/// Operators of equal work; operator i makes tensor i, of cost `cost[i]`, from those of `reads[i]`.
OrderProblem network(int stages, const std::vector<std::vector<int>>& reads,
                     const std::vector<double>& cost) {
  OrderProblem problem;
  problem.stages = stages;
  problem.before = reads;
  const auto operators = static_cast<int>(reads.size());
  problem.weight.assign(operators, 1.0 / operators);
  for (int i = 0; i < operators; ++i) {
    OrderProblem::Tensor tensor{cost[i], {i}};
    for (int op = 0; op < operators; ++op) {
      if (std::count(reads[op].begin(), reads[op].end(), i) > 0) tensor.touches.push_back(op);
    }
    problem.tensors.push_back(tensor);
  }
  return problem;
}

OrderProblem random_problem(std::mt19937& random, int operators) {
  const auto pick = [&](int count) { return static_cast<int>(random() % count); };
  std::vector<std::vector<int>> reads(operators);
  std::vector<double> cost;
  for (int op = 0; op < operators; ++op) {
    for (int other = 0; other < op; ++other) {
      if (pick(op) < 2) reads[op].push_back(other);
    }
    cost.push_back(1 + pick(9));
  }
  OrderProblem problem = network(2 + pick(4), reads, cost);
  double total = 0;
  for (double& weight : problem.weight) total += weight = 1 + pick(5);
  for (double& weight : problem.weight) weight /= total;
  return problem;
}

/// The definition: over where the first cut lies, how many pairs of touches are divided.
double integrated(const OrderProblem& problem, const std::vector<int>& order) {
  constexpr int kSamples = 20000;
  std::vector<double> middle(order.size());
  double work = 0;
  for (int op : order) {
    middle[op] = work + problem.weight[op] / 2;
    work += problem.weight[op];
  }
  const double distance = 1.0 / (problem.stages - 1);
  double sum = 0;
  for (int sample = 0; sample < kSamples; ++sample) {
    const double first = distance * (sample + 0.5) / kSamples;
    const auto stage = [&](int op) { return std::floor((middle[op] - first) / distance); };
    for (const OrderProblem::Tensor& tensor : problem.tensors) {
      std::vector<double> stages;
      for (int op : tensor.touches) stages.push_back(stage(op));
      std::sort(stages.begin(), stages.end());
      const auto different = std::unique(stages.begin(), stages.end()) - stages.begin();
      sum += tensor.cost * static_cast<double>(different - 1);
    }
  }
  return sum / kSamples;
}

TEST(ExpectedTransfers, IsTheMeanOverWhereStagesBegin) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    const OrderProblem problem = random_problem(random, 7);
    const double expected = integrated(problem, program(7));
    EXPECT_NEAR(expected_transfers(problem, program(7)), expected, 0.01 * expected);
  }
}

TEST(CheaperOrder, RunsOneTowerAfterTheOther) {
  // a0 b0 a1 b1 a2 b2 loss
  const auto problem = network(2, {{}, {}, {0}, {1}, {2}, {3}, {4, 5}}, std::vector<double>(7, 1));
  EXPECT_THAT(cheaper_order(problem, 0), ElementsAre(0, 2, 4, 1, 3, 5, 6));
}

TEST(CheaperOrder, MakesLateWhatIsUsedLate) {
  // Embedding of the decoder first, then an encoder, then the decoder that reads both.
  const auto problem = network(2, {{}, {0}, {}, {2}, {3}, {1, 4}, {5}}, std::vector<double>(7, 1));
  EXPECT_THAT(cheaper_order(problem, 0), ElementsAre(2, 3, 4, 0, 1, 5, 6));
}

TEST(CheaperOrder, MakesEarlyWhatIsSmall) {
  // Operators 0, 1 and 2 are a chain of large tensors; 4 makes something small of the first.
  const auto problem = network(2, {{}, {0}, {1}, {2}, {0}, {3, 4}}, {9, 9, 9, 9, 1, 1});
  EXPECT_THAT(cheaper_order(problem, 0), ElementsAre(0, 4, 1, 2, 3, 5));
}

TEST(CheaperOrder, LeavesOneSmallTensorWhereItIsMade) {
  const auto problem = network(2, {{}, {0}, {0}, {2}, {1, 3}}, {9, 1, 9, 9, 1});
  EXPECT_THAT(cheaper_order(problem, 0), IsEmpty()) << "sinking operator 1 would keep 0 alive";
}

TEST(CheaperOrder, KeepsWhatNothingDependsOnBeforeItsSuccessor) {
  // Operators 1 and 4 update something, for 2 and 5; 0 2 and 3 5 are towers.
  auto problem = network(2, {{}, {}, {0}, {}, {}, {3}, {2, 5}}, {1, 0, 1, 1, 0, 1, 1});
  EXPECT_THAT(cheaper_order(problem, 0), IsEmpty());
  problem = network(2, {{}, {}, {}, {0}, {}, {2}, {3, 5}}, {1, 0, 1, 1, 0, 1, 1});
  EXPECT_THAT(cheaper_order(problem, 0), ElementsAre(1, 2, 4, 5, 0, 3, 6))
      << "1 goes with 2, and 4 with 5";
}

TEST(CheaperOrder, HasToBeWorthIt) {
  const auto problem = network(2, {{}, {}, {0}, {1}, {2}, {3}, {4, 5}}, std::vector<double>(7, 1));
  const double before = expected_transfers(problem, program(7));
  const double after = expected_transfers(problem, cheaper_order(problem, 0));
  const double gain = 1 - after / before;
  EXPECT_GT(gain, 0.1);
  EXPECT_THAT(cheaper_order(problem, gain + 0.01), IsEmpty());
  EXPECT_FALSE(cheaper_order(problem, gain - 0.01).empty());
}

TEST(CheaperOrder, OneStageOrNothingToReorder) {
  auto problem = network(2, {{}, {}, {0}, {1}, {2, 3}}, std::vector<double>(5, 1));
  problem.stages = 1;
  EXPECT_THAT(cheaper_order(problem, 0), IsEmpty());
  EXPECT_THAT(cheaper_order(network(4, {}, {}), 0), IsEmpty());
}

/// All orders that keep the required sequence.
void each_order(const OrderProblem& problem, std::vector<int>& order,
                const std::function<void()>& visit) {
  if (static_cast<int>(order.size()) == problem.operators()) return visit();
  for (int op = 0; op < problem.operators(); ++op) {
    const auto is_placed = [&](int other) {
      return std::find(order.begin(), order.end(), other) != order.end();
    };
    const auto& before = problem.before[op];
    if (is_placed(op) || !std::all_of(before.begin(), before.end(), is_placed)) continue;
    order.push_back(op);
    each_order(problem, order, visit);
    order.pop_back();
  }
}

TEST(CheaperOrder, IsCloseToTheBestOfAllOrders) {
  std::mt19937 random(2);
  constexpr int kRounds = 300;
  int optimal = 0, improvable = 0;
  double excess = 0;
  for (int round = 0; round < kRounds; ++round) {
    const OrderProblem problem = random_problem(random, 8);
    const double start = expected_transfers(problem, program(8));
    double best = start;
    std::vector<int> order;
    each_order(problem, order, [&] { best = std::min(best, expected_transfers(problem, order)); });
    const auto found = cheaper_order(problem, 0);
    ASSERT_TRUE(found.empty() || is_legal(problem, found)) << "round " << round;
    const double got = found.empty() ? start : expected_transfers(problem, found);
    ASSERT_GE(got, best * (1 - 1e-9)) << "round " << round;
    ASSERT_LE(got, start) << "round " << round;
    improvable += best < start * (1 - 1e-9) ? 1 : 0;
    optimal += got <= best * (1 + 1e-9) ? 1 : 0;
    excess += got / best - 1;
  }
  RecordProperty("optimal", optimal);
  std::cout << improvable << " of " << kRounds << " can be improved, " << optimal
            << " are optimal, on average " << 100 * excess / kRounds << " % above\n";
  EXPECT_GT(improvable, kRounds / 2) << "the test would show nothing";
  EXPECT_GT(optimal, 0.9 * kRounds);
  EXPECT_LT(excess / kRounds, 0.01);
}

TEST(CheaperOrder, TenThousandOperators) {
  // Ten towers, written layer by layer, with random skips inside a tower.
  constexpr int kTowers = 10, kLayers = 1000;
  std::mt19937 random(3);
  std::vector<std::vector<int>> reads(kTowers * kLayers + 1);
  for (int op = kTowers; op < kTowers * kLayers; ++op) {
    reads[op].push_back(op - kTowers);
    const int layer = op / kTowers;
    if (random() % 8 == 0) {
      reads[op].push_back(op - kTowers * (1 + static_cast<int>(random() % layer)));
    }
    std::sort(reads[op].begin(), reads[op].end());
    reads[op].erase(std::unique(reads[op].begin(), reads[op].end()), reads[op].end());
  }
  for (int tower = 0; tower < kTowers; ++tower) {
    reads.back().push_back(kTowers * (kLayers - 1) + tower);
  }
  OrderProblem problem;
  problem.stages = 64;
  problem.before = reads;
  problem.weight.assign(reads.size(), 1.0 / static_cast<double>(reads.size()));
  for (size_t op = 0; op < reads.size(); ++op) {
    problem.tensors.push_back({1, {static_cast<int>(op)}});
    for (int other : reads[op]) problem.tensors[other].touches.push_back(static_cast<int>(op));
  }
  const auto order = cheaper_order(problem, 0);
  ASSERT_TRUE(is_legal(problem, order));
  std::vector<int> by_tower;
  for (int tower = 0; tower < kTowers; ++tower) {
    for (int layer = 0; layer < kLayers; ++layer) by_tower.push_back(kTowers * layer + tower);
  }
  by_tower.push_back(kTowers * kLayers);
  const double good = expected_transfers(problem, by_tower);
  ASSERT_LT(good, 0.7 * expected_transfers(problem, program(problem.operators())));
  EXPECT_LE(expected_transfers(problem, order), good * (1 + 1e-9));
  EXPECT_EQ(order, cheaper_order(problem, 0)) << "deterministic";
}

}  // namespace
}  // namespace smp::partitioner
