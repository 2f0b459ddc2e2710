// SPDX-License-Identifier: Apache-2.0
#include "partitioner/units.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "graph/alias_analysis.h"
#include "partitioner/complete.h"
#include "partitioner/cuts.h"
#include "partitioner/data_flow.h"

namespace smp::partitioner {
namespace {

using graph::Graph;
using graph::ValueId;

/// A unit has a weight and its neighbour's, or a weight and its bias: with the next unit that is
/// gathered meanwhile four, as many as it takes to hide gathers behind computations.
constexpr size_t kParameters = 2;

/// Parameters of a unit, each once.
class Reads {
 public:
  Reads(const Graph& graph, const UnitOptions& options) : graph_(graph), aliases_(graph) {
    for (const auto& set : aliases_.sets()) {
      is_divided_.push_back(set.base != graph::kUndefined &&
                            graph.values[set.base].kind == graph::ValueKind::kParameter &&
                            options.divides(graph.values[set.base]));
    }
  }

  /// Adds those that an operator reads.
  void add(int index, std::vector<ValueId>& parameters) const {
    for_each_argument(graph_.operators[index], [&](ValueId id) {
      const int alias_set = graph_.values[id].alias_set;
      if (alias_set < 0 || !is_divided_[alias_set]) return;
      const ValueId parameter = aliases_.set(alias_set).base;
      if (std::count(parameters.begin(), parameters.end(), parameter) == 0) {
        parameters.push_back(parameter);
      }
    });
  }

  int64_t elements(const std::vector<ValueId>& parameters) const {
    int64_t sum = 0;
    for (ValueId id : parameters) sum += graph_.values[id].meta.numel();
    return sum;
  }

 private:
  const Graph& graph_;
  const graph::AliasAnalysis aliases_;
  std::vector<bool> is_divided_;  // alias sets of such parameters
};

}  // namespace

std::vector<int> find_units(const Graph& graph, const std::vector<int>& stage_of_operator,
                            const std::vector<int>& regions, const UnitOptions& options) {
  const Reads reads(graph, options);
  const std::vector<bool> legal = legal_cuts(graph);
  const auto count = static_cast<int>(graph.operators.size());
  const auto changes_stage = [&](int i) {
    return stage_of_operator[i] != stage_of_operator[i + 1];
  };
  const auto may_end = [&](int i) {
    const bool in_region = !regions.empty() && regions[i] >= 0 && regions[i] == regions[i + 1];
    return changes_stage(i) || (legal[i] && !in_region);
  };
  std::vector<int> units(count);
  std::vector<ValueId> unit;  // parameters of the unit
  int number = 0;
  for (int first = 0, last = 0; first < count; first = last + 1) {
    // The operators up to the next place where a unit may end stay together.
    for (last = first; last + 1 < count && !may_end(last);) ++last;
    std::vector<ValueId> longer = unit;
    for (int i = first; i <= last; ++i) reads.add(i, longer);
    const bool is_full =
        unit.size() >= kParameters || reads.elements(longer) > options.most_elements;
    const bool starts_stage = first > 0 && changes_stage(first - 1);
    if (starts_stage || (!unit.empty() && longer.size() > unit.size() && is_full)) {
      ++number;
      longer.clear();
      for (int i = first; i <= last; ++i) reads.add(i, longer);
    }
    std::fill(units.begin() + first, units.begin() + last + 1, number);
    unit = std::move(longer);
  }
  return units;
}

Plan divided_into_units(const Graph& graph, const Plan& plan,
                        const std::vector<int>& unit_of_operator) {
  std::map<std::string, int> owners;
  for (const auto& [name, stage] : plan.owner) owners.emplace(name, plan.rank_of_stage[stage]);
  // Stages without operators get a number of their own between the others'.
  std::vector<int> ranks, units;
  int before = -1, stage = 0;
  const auto add_empty_stages = [&](int end) {
    for (; stage < end; ++stage) ranks.push_back(plan.rank_of_stage[stage]);
  };
  for (size_t i = 0; i < unit_of_operator.size(); ++i) {
    if (unit_of_operator[i] != before) {
      const int of = plan.stage_of_operator[i];
      add_empty_stages(of);
      ranks.push_back(plan.rank_of_stage[of]);
      stage = of + 1;
      before = unit_of_operator[i];
    }
    units.push_back(static_cast<int>(ranks.size()) - 1);
  }
  add_empty_stages(plan.stages());
  Plan result = complete_plan(graph, std::move(ranks), std::move(units), owners);
  result.order = plan.order;
  result.reason_of_operator = plan.reason_of_operator;
  return result;
}

std::vector<std::vector<ValueId>> parameters_of_units(const Graph& graph,
                                                      const std::vector<int>& unit_of_operator,
                                                      const UnitOptions& options) {
  const Reads reads(graph, options);
  std::vector<std::vector<ValueId>> result(unit_of_operator.empty() ? 0
                                                                    : unit_of_operator.back() + 1);
  for (size_t i = 0; i < unit_of_operator.size(); ++i) {
    reads.add(static_cast<int>(i), result[unit_of_operator[i]]);
  }
  return result;
}

}  // namespace smp::partitioner
