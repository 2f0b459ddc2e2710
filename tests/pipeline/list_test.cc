#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "pipeline/generators.h"
#include "pipeline/ranking.h"
#include "pipeline/simulator.h"
#include "pipeline/verifier.h"
#include "tests/pipeline/schedule_helpers.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

// --- the best of all orders, by trying them all ---------------------------------------------

/// Every order of the computes of one stage, backwards split, that the rules allow.
class AllOrders {
 public:
  AllOrders(int stage, int microbatches) : stage_(stage), microbatches_(microbatches) { extend(); }

  const std::vector<std::vector<Action>>& get() const { return orders_; }

 private:
  void extend() {
    if (weights_ == microbatches_) {
      orders_.push_back(order_);
      return;
    }
    if (forwards_ < microbatches_) next(forward_of(stage_, forwards_), forwards_);
    if (inputs_ < forwards_) next(backward_input_of(stage_, inputs_), inputs_);
    if (weights_ < inputs_) next(backward_weight_of(stage_, weights_), weights_);
  }

  void next(const Action& action, int& count) {
    order_.push_back(action);
    ++count;
    extend();
    --count;
    order_.pop_back();
  }

  int stage_;
  int microbatches_;
  int forwards_ = 0;
  int inputs_ = 0;
  int weights_ = 0;
  std::vector<Action> order_;
  std::vector<std::vector<Action>> orders_;
};

double peak_of(const std::vector<Action>& order, const StageCosts& costs) {
  double kept = 0;
  double peak = 0;
  for (const auto& action : order) {
    const auto stage = static_cast<size_t>(action.stage);
    if (action.kind == Kind::kForward) kept += costs.kept[stage];
    if (action.kind == Kind::kBackwardInput) {
      kept -= costs.kept[stage] - costs.kept_for_weights[stage];
    }
    if (action.kind == Kind::kBackwardWeight) kept -= costs.kept_for_weights[stage];
    peak = std::max(peak, kept);
  }
  return peak;
}

/// One stage on each rank, connected as a chain: the time of an order by its recursion. Ends are
/// NaN until they are known.
double makespan_of(const std::vector<const std::vector<Action>*>& orders, int microbatches,
                   const StageCosts& costs) {
  const size_t stages = orders.size();
  constexpr double kUnknown = -1;
  std::vector<std::vector<double>> forwards(
      stages, std::vector<double>(static_cast<size_t>(microbatches), kUnknown));
  auto inputs = forwards;
  std::vector<size_t> positions(stages, 0);
  std::vector<double> clocks(stages, 0);
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t s = 0; s < stages; ++s) {
      for (; positions[s] < orders[s]->size(); ++positions[s], progress = true) {
        const auto& action = (*orders[s])[positions[s]];
        const auto m = static_cast<size_t>(action.microbatch);
        double start = clocks[s];
        double cost = costs.backward_weight[s];
        if (action.kind == Kind::kForward) {
          cost = costs.forward[s];
          if (s > 0) {
            if (forwards[s - 1][m] == kUnknown) break;
            start = std::max(start, forwards[s - 1][m] + costs.latency[s - 1]);
          }
          forwards[s][m] = start + cost;
        } else if (action.kind == Kind::kBackwardInput) {
          cost = costs.backward_input[s];
          if (s + 1 < stages) {
            if (inputs[s + 1][m] == kUnknown) break;
            start = std::max(start, inputs[s + 1][m] + costs.backward_latency[s]);
          }
          inputs[s][m] = start + cost;
        }
        clocks[s] = start + cost;
      }
    }
  }
  for (size_t s = 0; s < stages; ++s) {
    if (positions[s] < orders[s]->size()) return std::numeric_limits<double>::infinity();
  }
  return *std::max_element(clocks.begin(), clocks.end());
}

/// The least makespan within the memory limit.
double brute_force(const ScheduleOptions& options) {
  const auto costs =
      options.costs().filled(static_cast<size_t>(options.stages()), options.edges().size());
  std::vector<std::vector<std::vector<Action>>> orders;
  for (int stage = 0; stage < options.stages(); ++stage) {
    orders.emplace_back();
    const AllOrders all(stage, options.microbatches());
    for (const auto& order : all.get()) {
      const bool fits = options.memory_limit().empty() ||
                        peak_of(order, costs) <= options.memory_limit()[orders.size() - 1];
      if (fits) orders.back().push_back(order);
    }
  }
  double best = std::numeric_limits<double>::infinity();
  std::vector<size_t> chosen(orders.size(), 0);
  for (;;) {
    std::vector<const std::vector<Action>*> tried;
    for (size_t s = 0; s < orders.size(); ++s) tried.push_back(&orders[s][chosen[s]]);
    best = std::min(best, makespan_of(tried, options.microbatches(), costs));
    size_t s = 0;
    while (s < orders.size() && ++chosen[s] == orders[s].size()) chosen[s++] = 0;
    if (s == orders.size()) return best;
  }
}

Simulation run(const ScheduleOptions& options) {
  const auto schedule = lowered(list_schedule, options);
  verify(schedule, options.edges(), VerifyOptions().credit(options.microbatches()));
  return simulate(schedule, options.edges(), options.costs());
}

/// Whole numbers, so that sums are exact.
StageCosts random_costs(int stages, std::mt19937& random) {
  const auto draw = [&](int least, int most) {
    return static_cast<double>(std::uniform_int_distribution<int>(least, most)(random));
  };
  StageCosts costs;
  for (int stage = 0; stage < stages; ++stage) {
    costs.forward.push_back(draw(1, 6));
    costs.backward_input.push_back(draw(1, 6));
    costs.backward_weight.push_back(draw(1, 6));
    costs.kept.push_back(draw(2, 4));
    costs.kept_for_weights.push_back(draw(0, 2));
    if (stage > 0) {
      costs.latency.push_back(draw(0, 3));
      costs.backward_latency.push_back(draw(0, 3));
    }
  }
  return costs;
}

// No proof: a search that found the optimum in all of these.
TEST(List, FindsTheBestOrderOfTinyPipelines) {
  std::mt19937 random(2026);
  for (const auto& [stages, microbatches] : {std::pair(2, 2), {2, 3}, {2, 4}, {3, 2}, {3, 3}}) {
    for (int trial = 0; trial < 12; ++trial) {
      auto options = ScheduleOptions(stages, microbatches);
      if (trial > 0) options.costs(random_costs(stages, random));
      if (trial % 2 == 1) {
        const int room = std::uniform_int_distribution<int>(4, 9)(random);
        options.memory_limit(std::vector<double>(static_cast<size_t>(stages), room));
      }
      EXPECT_EQ(run(options).makespan, brute_force(options))
          << stages << " stages, " << microbatches << " microbatches, trial " << trial;
    }
  }
}

}  // namespace
}  // namespace smp::pipeline
