// SPDX-License-Identifier: Apache-2.0
#include "partitioner/split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <utility>

namespace smp::partitioner {
namespace {

/// A tensor and the pieces that make and use it, for the oracle, which knows no `previous`.
struct Tensor {
  int producer = -1;
  std::set<int> users;
  PieceUse use;  ///< the cost of every use of it
};

struct Case {
  SplitProblem problem;
  std::vector<Tensor> tensors;
};

/// The value of a choice of cuts, straight from the definition.
SplitScore score(const Case& c, const std::vector<int>& cuts) {
  const SplitProblem& problem = c.problem;
  const auto stage_of = [&](int piece) {
    return static_cast<int>(
        std::count_if(cuts.begin(), cuts.end(), [&](int cut) { return cut <= piece; }));
  };
  SplitScore score;
  std::vector<int64_t> time(problem.stages(), 0), memory(problem.stages(), 0);
  for (int p = 0; p < static_cast<int>(problem.cost.size()); ++p) {
    const int stage = stage_of(p);
    time[stage] += problem.cost[p];
    memory[stage] += problem.fixed[p] + problem.in_flight[stage] * problem.kept[p];
    if (p > 0 && stage_of(p - 1) != stage) score.sum += problem.penalty[p];
  }
  for (const Tensor& tensor : c.tensors) {
    std::set<int> stages;
    for (int user : tensor.users) stages.insert(stage_of(user));
    int sender = tensor.producer < 0 ? -1 : stage_of(tensor.producer);
    for (int stage : stages) {
      if (stage == sender) continue;
      if (sender >= 0) {
        time[sender] += tensor.use.cost;
        memory[sender] += tensor.use.sent;
      }
      time[stage] += tensor.use.cost;
      memory[stage] += tensor.use.fixed + problem.in_flight[stage] * tensor.use.kept;
      if (tensor.use.owner >= 0 && problem.rank_of_stage[stage] != tensor.use.owner) {
        score.foreign += tensor.use.foreign;
      }
      sender = stage;
    }
  }
  for (int s = 0; s < problem.stages(); ++s) {
    score.sum += time[s];
    score.peak = std::max<int64_t>(
        score.peak, time[s] * std::count(problem.rank_of_stage.begin(), problem.rank_of_stage.end(),
                                         problem.rank_of_stage[s]));
    score.memory = std::max(score.memory, memory[s]);
  }
  return score;
}

void all_cuts(const SplitProblem& problem, std::vector<int>& cuts,
              std::vector<std::vector<int>>& result) {
  const int pieces = static_cast<int>(problem.cost.size());
  const int shortest = problem.allow_empty ? 0 : 1;
  const int j = static_cast<int>(cuts.size());
  const int before = j == 0 ? 0 : cuts.back();
  if (j + 1 == problem.stages()) {
    if (pieces - before >= shortest) result.push_back(cuts);
    return;
  }
  for (int cut = std::max(before + shortest, problem.earliest[j]);
       cut <= std::min(pieces, problem.latest[j]); ++cut) {
    cuts.push_back(cut);
    all_cuts(problem, cuts, result);
    cuts.pop_back();
  }
}

std::pair<int64_t, int64_t> worth(const Case& c, const SplitScore& score) {
  const int64_t weight = std::max<int64_t>(c.problem.microbatches - 1, 1);
  return {score.foreign, score.sum + weight * score.peak};
}

/// Tries every choice of cuts.
struct BruteForce {
  std::optional<SplitScore> best;
  std::optional<int64_t> memory;  ///< the least of the choices with the fewest foreign bytes

  explicit BruteForce(const Case& c) {
    std::vector<std::vector<int>> choices;
    std::vector<int> none;
    all_cuts(c.problem, none, choices);
    std::optional<std::pair<int64_t, int64_t>> least;
    for (const auto& cuts : choices) {
      const SplitScore s = score(c, cuts);
      const auto memory_of = std::make_pair(s.foreign, s.memory);
      if (!least || memory_of < *least) least = memory_of;
      if (c.problem.memory_limit > 0 && s.memory > c.problem.memory_limit) continue;
      if (!best || worth(c, s) < worth(c, *best)) best = s;
    }
    if (least) memory = least->second;
  }
};

class RandomCase {
 public:
  explicit RandomCase(unsigned seed) : random_(seed) {}

  Case make() {
    Case c;
    SplitProblem& problem = c.problem;
    const int pieces = 1 + pick(9);
    const int stages = 1 + pick(5);
    for (int s = 0; s < stages; ++s) problem.rank_of_stage.push_back(s);
    if (stages > 2 && pick(4) == 0) problem.rank_of_stage.back() = 0;
    problem.allow_empty = pick(4) == 0;
    problem.microbatches = 1 + pick(6);
    for (int p = 0; p < pieces; ++p) {
      problem.cost.push_back(pick(3) == 0 ? 0 : 10 * pick(4));
      problem.kept.push_back(pick(3));
      problem.fixed.push_back(pick(5));
      problem.penalty.push_back(pick(3) == 0 ? pick(4) : 0);
    }
    if (pick(2) == 0) problem.memory_limit = 5 + pick(25);
    for (int s = 0; s < stages; ++s) problem.in_flight.push_back(stages - s);
    add_tensors(c, pieces);
    for (int j = 0; j + 1 < stages; ++j) {
      problem.earliest.push_back(pick(4) == 0 ? pick(pieces + 1) : 0);
      problem.latest.push_back(pick(4) == 0 ? pick(pieces + 1) : pieces);
    }
    std::sort(problem.earliest.begin(), problem.earliest.end());
    std::sort(problem.latest.begin(), problem.latest.end());
    return c;
  }

 private:
  int pick(int count) { return static_cast<int>(random_() % count); }

  void add_tensors(Case& c, int pieces) {
    const bool owned = pick(2) == 0;
    for (int t = 0; t < 10; ++t) {
      Tensor tensor;
      if (owned && pick(2) == 0) {
        tensor.use.owner = c.problem.rank_of_stage[pick(c.problem.stages())];
        tensor.use.foreign = 1 + pick(3);
      } else {
        tensor.producer = pick(pieces);
        tensor.use.cost = pick(6);
        tensor.use.kept = pick(3);
        tensor.use.fixed = pick(2);
        tensor.use.sent = pick(2);
      }
      for (int u = 0; u < 3; ++u) {
        const int user = pick(pieces);
        if (user > tensor.producer) tensor.users.insert(user);
      }
      PieceUse use = tensor.use;
      use.previous = tensor.producer;
      for (int user : tensor.users) {
        use.piece = user;
        c.problem.uses.push_back(use);
        use.previous = user;
      }
      c.tensors.push_back(tensor);
    }
    std::stable_sort(c.problem.uses.begin(), c.problem.uses.end(),
                     [](auto& a, auto& b) { return a.piece < b.piece; });
  }

  std::mt19937 random_;
};

TEST(Split, EqualsBruteForce) {
  RandomCase random(1);
  int possible = 0, out_of_memory = 0, impossible = 0;
  for (int i = 0; i < 5000; ++i) {
    const Case c = random.make();
    const BruteForce expected(c);
    const auto got = split(c.problem);
    ASSERT_EQ(got.has_value(), expected.best.has_value()) << "case " << i;
    (expected.best ? possible : expected.memory ? out_of_memory : impossible) += 1;
    ASSERT_EQ(smallest_memory_limit(c.problem), expected.memory) << "case " << i;
    if (!got) continue;
    const SplitScore mine = score(c, *got);
    ASSERT_EQ(worth(c, mine), worth(c, *expected.best)) << "case " << i;
    const SplitScore claimed = score_split(c.problem, *got);
    ASSERT_EQ(std::tie(claimed.foreign, claimed.sum, claimed.peak, claimed.memory),
              std::tie(mine.foreign, mine.sum, mine.peak, mine.memory))
        << "case " << i;
    ASSERT_EQ(claimed.step(c.problem.microbatches), worth(c, mine).second);
  }
  EXPECT_GT(possible, 1000);
  EXPECT_GT(out_of_memory, 300);
  EXPECT_GT(impossible, 300);
}

/// Four pieces of 10, of which the tensor between the middle two is dear.
SplitProblem four_pieces(int64_t microbatches, int64_t dear) {
  SplitProblem problem;
  problem.rank_of_stage = {0, 1};
  problem.microbatches = microbatches;
  problem.cost = {10, 10, 10, 10};
  problem.kept = problem.fixed = problem.penalty = {0, 0, 0, 0};
  problem.uses = {{1, 0, 1}, {2, 1, dear}, {3, 2, 1}};
  problem.earliest = {1};
  problem.latest = {3};
  problem.in_flight = {1, 1};
  return problem;
}

TEST(Split, WeighsBalanceAgainstTransfersByTheNumberOfMicrobatches) {
  // In the middle: sum 40 + 2 d, peak 20 + d; beside it: sum 42, peak 31.
  EXPECT_EQ(split(four_pieces(2, 4)), std::vector<int>{2}) << "48 + 24 < 42 + 31";
  EXPECT_EQ(split(four_pieces(2, 5)), std::vector<int>{1}) << "50 + 25 > 42 + 31";
  EXPECT_EQ(split(four_pieces(9, 5)), std::vector<int>{2}) << "50 + 8 * 25 < 42 + 8 * 31";
  EXPECT_EQ(split(four_pieces(9, 12)), std::vector<int>{1});
}

TEST(Split, TheMemoryLimitComesBeforeTheTime) {
  SplitProblem problem = four_pieces(2, 1);
  problem.fixed = {5, 5, 1, 1};
  problem.kept = {1, 1, 1, 1};
  problem.in_flight = {3, 1};
  EXPECT_EQ(split(problem), std::vector<int>{2});
  problem.memory_limit = 15;
  EXPECT_EQ(split(problem), std::vector<int>{1}) << "5 + 3 * 1 and 7 + 3";
  problem.memory_limit = 9;
  EXPECT_EQ(split(problem), std::nullopt);
  EXPECT_EQ(smallest_memory_limit(problem), 10);
}

/// Prints times; the sizes are far beyond any model we know.
TEST(Split, ManyPiecesIntoFewAndManyStages) {
  std::mt19937 random(2);
  for (const auto& [stages, microbatches] :
       {std::pair(2, 8), std::pair(4, 8), std::pair(64, 1), std::pair(64, 128)}) {
    for (const bool heavy : {false, true}) {
      SplitProblem problem;
      for (int s = 0; s < stages; ++s) problem.rank_of_stage.push_back(s);
      problem.microbatches = microbatches;
      problem.gap = 0.001;
      const int pieces = heavy ? 3000 : 10000;
      for (int p = 0; p < pieces; ++p) {
        problem.cost.push_back(1000 + static_cast<int64_t>(random() % 100000));
        const auto dear = static_cast<int64_t>(random() % 100000);
        if (p > 0) problem.uses.push_back({p, p - 1, dear});
        if (p > 40) problem.uses.push_back({p, p - 40, 100});
      }
      if (heavy) problem.cost[2000] = 40'000'000;  // a fifth of the whole: stages may be long
      problem.kept = problem.fixed = problem.penalty = std::vector<int64_t>(pieces, 1);
      problem.in_flight.assign(stages, 1);
      problem.memory_limit = 2 * pieces;
      for (int j = 0; j + 1 < stages; ++j) {
        problem.earliest.push_back(j + 1);
        problem.latest.push_back(pieces - stages + 1 + j);
      }
      const auto start = std::chrono::steady_clock::now();
      const auto cuts = split(problem);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      std::cout << stages << " stages, " << microbatches << " microbatches, "
                << (heavy ? "one heavy piece: " : "even: ") << seconds.count() << " s\n";
      ASSERT_TRUE(cuts.has_value());
      EXPECT_TRUE(std::is_sorted(cuts->begin(), cuts->end()));
    }
  }
}

}  // namespace
}  // namespace smp::partitioner
