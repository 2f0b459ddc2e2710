// SPDX-License-Identifier: Apache-2.0
#include "partitioner/units.h"

#include <algorithm>
#include <cmath>
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

constexpr int kUndivided = -1;

/// Adds those that are not there.
void unite(const std::vector<ValueId>& added, std::vector<ValueId>& parameters) {
  for (ValueId id : added) {
    if (std::count(parameters.begin(), parameters.end(), id) == 0) parameters.push_back(id);
  }
}

/// Divided parameters that operators read on the ranks that own them.
class Reads {
 public:
  Reads(const Graph& graph, const Plan& plan, const ReplicaSharding& sharding)
      : graph_(graph), plan_(plan), aliases_(graph) {
    for (const auto& set : aliases_.sets()) owner_.push_back(owner_of(set.base, sharding));
  }

  /// Adds those that an operator reads, each once.
  void add(int index, std::vector<ValueId>& parameters) const {
    const int rank = plan_.rank_of_stage[plan_.stage_of_operator[index]];
    for_each_argument(graph_.operators[index], [&](ValueId id) {
      const int alias_set = graph_.values[id].alias_set;
      if (alias_set < 0 || owner_[alias_set] != rank) return;
      unite({aliases_.set(alias_set).base}, parameters);
    });
  }

  int64_t elements(const std::vector<ValueId>& parameters) const {
    int64_t sum = 0;
    for (ValueId id : parameters) sum += graph_.values[id].meta.numel();
    return sum;
  }

  /// The mean, over all elements, of the size of the parameter in which one lies.
  int64_t typical_elements() const {
    double sum = 0, squares = 0;
    for (size_t set = 0; set < owner_.size(); ++set) {
      if (owner_[set] == kUndivided) continue;
      const auto count =
          static_cast<double>(graph_.values[aliases_.set(static_cast<int>(set)).base].meta.numel());
      sum += count;
      squares += count * count;
    }
    return sum > 0 ? std::llround(squares / sum) : 0;
  }

 private:
  /// The rank that owns a divided parameter.
  int owner_of(ValueId base, const ReplicaSharding& sharding) const {
    if (base == graph::kUndefined || !sharding.divides(graph_.values[base])) return kUndivided;
    const auto stage = plan_.owner.find(graph_.values[base].name);
    return stage == plan_.owner.end() ? kUndivided : plan_.rank_of_stage[stage->second];
  }

  const Graph& graph_;
  const Plan& plan_;
  const graph::AliasAnalysis aliases_;
  std::vector<int> owner_;  // owner of each alias set
};

/// The operators behind which a unit may end, ascending.
std::vector<int> possible_ends(const Graph& graph, const Plan& plan,
                               const std::vector<int>& regions) {
  const std::vector<bool> legal = legal_cuts(graph);
  std::vector<int> ends;
  const auto count = static_cast<int>(graph.operators.size());
  for (int i = 0; i < count; ++i) {
    const bool is_last = i + 1 == count;
    const bool changes_stage =
        !is_last && plan.stage_of_operator[i] != plan.stage_of_operator[i + 1];
    const auto in_region = [&] {
      return !regions.empty() && regions[i] >= 0 && regions[i] == regions[i + 1];
    };
    if (is_last || changes_stage || (legal[i] && !in_region())) ends.push_back(i);
  }
  return ends;
}

/// Operators that no unit divides, and the parameters that they read.
struct Run {
  int last = 0;
  std::vector<ValueId> parameters;
};

/// A run goes on while operators read its parameters, or none: between a weight's transpose and its
/// product the weight would be in two units.
std::vector<Run> find_runs(const Graph& graph, const Plan& plan, const std::vector<int>& regions,
                           const Reads& reads) {
  std::vector<Run> runs;
  int next = 0;
  for (const int end : possible_ends(graph, plan, regions)) {
    Run run{end, {}};
    for (; next <= end; ++next) reads.add(next, run.parameters);
    const auto is_known = [&](ValueId id) {
      const auto& known = runs.back().parameters;
      return std::count(known.begin(), known.end(), id) > 0;
    };
    const auto& read = run.parameters;
    const bool goes_on = !runs.empty() &&
                         plan.stage_of_operator[runs.back().last] == plan.stage_of_operator[end] &&
                         (read.empty() || std::any_of(read.begin(), read.end(), is_known));
    if (goes_on) {
      unite(read, runs.back().parameters);
      runs.back().last = end;
    } else {
      runs.push_back(std::move(run));
    }
  }
  return runs;
}

}  // namespace

Units find_units(const Graph& graph, const Plan& plan, const std::vector<int>& regions,
                 const ReplicaSharding& sharding) {
  const Reads reads(graph, plan, sharding);
  const int64_t enough = 2 * reads.typical_elements();
  const int64_t most = sharding.live() / 2;
  Units units;
  int stage = -1;  // stage of the last unit
  for (Run& run : find_runs(graph, plan, regions, reads)) {
    std::vector<ValueId> longer;
    if (units.count() > 0) longer = units.parameters.back();
    const size_t before = longer.size();
    unite(run.parameters, longer);
    const bool grows = before > 0 && longer.size() > before;
    const bool is_full = grows && (reads.elements(units.parameters.back()) >= enough ||
                                   reads.elements(longer) > most);
    const int of_run = plan.stage_of_operator[run.last];
    if (std::exchange(stage, of_run) != of_run || is_full) {
      units.parameters.push_back(std::move(run.parameters));
    } else {
      units.parameters.back() = std::move(longer);
    }
    units.of_operator.resize(static_cast<size_t>(run.last) + 1, units.count() - 1);
  }
  return units;
}

namespace {

/// Divided parameters that are whole together.
struct Gathered {
  int64_t elements = 0, bytes = 0;
};

Gathered gathered_by(const Graph& graph, const std::vector<ValueId>& parameters) {
  Gathered result;
  for (ValueId id : parameters) {
    result.elements += graph.values[id].meta.numel();
    result.bytes += graph.values[id].meta.nbytes();
  }
  return result;
}

/// The bytes of two units that follow each other. A backward may read less than its forward, and be
/// gathered ahead where that was not.
int64_t together(const Gathered& a, const Gathered& b, int64_t live) {
  const int64_t elements = a.elements + b.elements, bytes = a.bytes + b.bytes;
  if (elements <= live) return bytes;
  const double share = static_cast<double>(live) / static_cast<double>(elements);
  const auto allowed = static_cast<int64_t>(share * static_cast<double>(bytes));
  return std::max({a.bytes, b.bytes, allowed});
}

}  // namespace

std::vector<int64_t> gathered_bytes(const Graph& graph, const Plan& plan, const Units& units,
                                    const ReplicaSharding& sharding) {
  const int ranks = *std::max_element(plan.rank_of_stage.begin(), plan.rank_of_stage.end()) + 1;
  std::vector<int64_t> most(ranks, 0);
  std::vector<std::vector<Gathered>> of_rank(ranks, {Gathered()});
  int before = -1;
  for (size_t i = 0; i < units.of_operator.size(); ++i) {
    if (std::exchange(before, units.of_operator[i]) == units.of_operator[i]) continue;
    const int rank = plan.rank_of_stage[plan.stage_of_operator[i]];
    const Gathered unit = gathered_by(graph, units.parameters[units.of_operator[i]]);
    for (const Gathered& other : of_rank[rank]) {
      most[rank] = std::max(most[rank], together(unit, other, sharding.live()));
    }
    of_rank[rank].push_back(unit);
  }
  return most;
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

}  // namespace smp::partitioner
