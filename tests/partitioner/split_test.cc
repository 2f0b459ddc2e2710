#include "partitioner/split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <random>
#include <set>
#include <tuple>

namespace smp::partitioner {
namespace {

/// A tensor and the pieces that make and use it, for the oracle, which knows no `previous`.
struct Tensor {
  int producer = -1;
  std::set<int> users;
  int64_t bytes = 0;
  int owner = -1;
};

struct Case {
  SplitProblem problem;
  std::vector<Tensor> tensors;
};

/// What a choice of cuts costs, straight from the definition.
struct Score {
  int64_t foreign = 0, peak = 0, crossing = 0;
  std::vector<int> cuts;
};

Score score(const Case& c, const std::vector<int>& cuts) {
  Score score;
  score.cuts = cuts;
  const auto stage_of = [&](int piece) {
    return static_cast<int>(
        std::count_if(cuts.begin(), cuts.end(), [&](int cut) { return cut <= piece; }));
  };
  std::vector<int64_t> cost(c.problem.stages, 0);
  for (size_t p = 0; p < c.problem.cost.size(); ++p) {
    cost[stage_of(static_cast<int>(p))] += c.problem.cost[p];
  }
  score.peak = *std::max_element(cost.begin(), cost.end());
  for (const Tensor& tensor : c.tensors) {
    std::set<int> stages;
    for (int user : tensor.users) stages.insert(stage_of(user));
    stages.erase(tensor.owner >= 0 ? tensor.owner : stage_of(tensor.producer));
    (tensor.owner >= 0 ? score.foreign : score.crossing) +=
        tensor.bytes * static_cast<int64_t>(stages.size());
  }
  return score;
}

void all_cuts(const SplitProblem& problem, std::vector<int>& cuts,
              std::vector<std::vector<int>>& result) {
  const int pieces = static_cast<int>(problem.cost.size());
  const int shortest = problem.allow_empty ? 0 : 1;
  const int j = static_cast<int>(cuts.size());
  const int before = j == 0 ? 0 : cuts.back();
  if (j + 1 == problem.stages) {
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

/// Tries every choice of cuts.
std::vector<int> brute_force(const Case& c, bool& feasible) {
  std::vector<std::vector<int>> choices;
  std::vector<int> none;
  all_cuts(c.problem, none, choices);
  feasible = !choices.empty();
  if (!feasible) return {};
  std::vector<Score> scores;
  for (const auto& cuts : choices) scores.push_back(score(c, cuts));
  const Score first = *std::min_element(scores.begin(), scores.end(), [](auto& a, auto& b) {
    return std::tie(a.foreign, a.peak) < std::tie(b.foreign, b.peak);
  });
  const int64_t slack = static_cast<int64_t>(c.problem.tolerance * static_cast<double>(first.peak));
  const Score* best = nullptr;
  for (const Score& s : scores) {
    if (s.foreign > first.foreign || s.peak > first.peak + slack) continue;
    if (best == nullptr || std::tie(s.crossing, s.cuts) < std::tie(best->crossing, best->cuts)) {
      best = &s;
    }
  }
  return best->cuts;
}

Case random_case(std::mt19937& random) {
  const auto pick = [&](int count) { return static_cast<int>(random() % count); };
  Case c;
  SplitProblem& problem = c.problem;
  const int pieces = 1 + pick(9);
  problem.stages = 1 + pick(5);
  problem.allow_empty = pick(4) == 0;
  problem.tolerance = pick(2) * 0.3;
  for (int p = 0; p < pieces; ++p) problem.cost.push_back(pick(3) == 0 ? 0 : 10 * pick(4));
  const bool owned = pick(2) == 0;
  for (int t = 0; t < 10; ++t) {
    Tensor tensor;
    tensor.bytes = 1 + pick(3);
    if (owned && pick(2) == 0) tensor.owner = pick(problem.stages);
    tensor.producer = tensor.owner >= 0 ? -1 : pick(pieces);
    for (int u = 0; u < 3; ++u) {
      const int user = pick(pieces);
      if (user > tensor.producer) tensor.users.insert(user);
    }
    int previous = tensor.producer;
    for (int user : tensor.users) {
      problem.uses.push_back({user, previous, tensor.bytes, tensor.owner});
      previous = user;
    }
    c.tensors.push_back(tensor);
  }
  std::stable_sort(problem.uses.begin(), problem.uses.end(),
                   [](auto& a, auto& b) { return a.piece < b.piece; });
  for (int j = 0; j + 1 < problem.stages; ++j) {
    const bool bounded = pick(4) == 0;
    problem.earliest.push_back(bounded ? pick(pieces + 1) : 0);
    problem.latest.push_back(pick(4) == 0 ? pick(pieces + 1) : pieces);
  }
  std::sort(problem.earliest.begin(), problem.earliest.end());
  std::sort(problem.latest.begin(), problem.latest.end());
  return c;
}

TEST(Split, EqualsBruteForce) {
  std::mt19937 random(1);
  int possible = 0, impossible = 0;
  for (int i = 0; i < 5000; ++i) {
    const Case c = random_case(random);
    bool feasible = false;
    const std::vector<int> expected = brute_force(c, feasible);
    const auto got = split(c.problem);
    ASSERT_EQ(got.has_value(), feasible) << "case " << i;
    (feasible ? possible : impossible) += 1;
    if (feasible) {
      ASSERT_EQ(*got, expected) << "case " << i;
    }
  }
  EXPECT_GT(possible, 1000);
  EXPECT_GT(impossible, 300);
}

/// Prints times; the sizes are far beyond any model we know.
TEST(Split, ManyPiecesIntoSixtyFourStages) {
  std::mt19937 random(2);
  for (const bool heavy : {false, true}) {
    SplitProblem problem;
    problem.stages = 64;
    problem.tolerance = 0.01;
    const int pieces = heavy ? 4000 : 10000;
    for (int p = 0; p < pieces; ++p) {
      problem.cost.push_back(1000 + static_cast<int64_t>(random() % 100000));
      if (p > 0) problem.uses.push_back({p, p - 1, static_cast<int64_t>(random() % 100), -1});
      if (p > 40) problem.uses.push_back({p, p - 40, 1, -1});
    }
    if (heavy) problem.cost[3000] = 50'000'000;  // a fifth of the whole: stages may be long
    for (int j = 0; j < 63; ++j) {
      problem.earliest.push_back(j + 1);
      problem.latest.push_back(pieces - 63 + j);
    }
    const auto start = std::chrono::steady_clock::now();
    const auto cuts = split(problem);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::cout << (heavy ? "one heavy piece: " : "even pieces: ") << seconds.count() << " s\n";
    ASSERT_TRUE(cuts.has_value());
    EXPECT_TRUE(std::is_sorted(cuts->begin(), cuts->end()));
  }
}

}  // namespace
}  // namespace smp::partitioner
