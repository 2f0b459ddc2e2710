// SPDX-License-Identifier: Apache-2.0
#include "partitioner/checkpointing.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "core/check.h"
#include "graph/alias_analysis.h"
#include "graph/checkpointed_segment.h"
#include "graph/differentiate.h"
#include "partitioner/data_flow.h"
#include "partitioner/modules.h"

namespace smp::partitioner {
namespace {

using graph::Graph;
using graph::Operator;
using graph::ValueId;

/// A module of a list, by its position.
struct Member {
  int list = -1;
  int module = -1;

  explicit operator bool() const { return list >= 0; }
  bool operator==(const Member& other) const {
    return list == other.list && module == other.module;
  }
};

/// The module that each operator belongs to.
std::vector<Member> members_of(const Graph& graph, const std::vector<CheckpointedModules>& lists) {
  std::map<std::string, Member> of_path;
  for (size_t l = 0; l < lists.size(); ++l) {
    for (size_t m = 0; m < lists[l].modules.size(); ++m) {
      of_path.emplace(lists[l].modules[m], Member{static_cast<int>(l), static_cast<int>(m)});
    }
  }
  const auto of_scope = [&](const std::string& scope) {
    auto found = of_path.find("");
    for (const std::string& path : enclosing_modules(scope)) {
      if (found == of_path.end()) found = of_path.find(path);
    }
    return found == of_path.end() ? Member() : found->second;
  };
  std::vector<Member> result(graph.operators.size());
  int last = static_cast<int>(graph.operators.size()) - 1;
  while (last >= 0 && !graph.operators[last].reads_parameter) --last;
  Member before;
  for (int i = 0; i <= last; ++i) {
    const Operator& op = graph.operators[i];
    result[i] = of_scope(op.scope);
    if (op.reads_parameter) {
      before = result[i];
    } else if (!result[i]) {
      result[i] = before;
    }
  }
  return result;
}

/// Bytes of the values that regions read from outside, at the operator that makes their memory.
/// Values that outlive a microbatch are there anyway.
std::vector<int64_t> input_bytes(const Graph& graph, const Regions& regions,
                                 const std::vector<int>& stage_of_operator) {
  const graph::AliasAnalysis aliases(graph);
  std::vector<int64_t> result(graph.operators.size(), 0);
  std::vector<bool> counted(graph.alias_sets, false);
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    if (regions[i] < 0) continue;
    for_each_argument(graph.operators[i], [&](ValueId id) {
      const int set = graph.values[id].alias_set;
      const int producer = graph.values[id].producer;
      const auto& memory = aliases.set(set);
      if (memory.outlives_run() || counted[set] || producer < 0 || regions[producer] == regions[i])
        return;
      const bool received =
          !stage_of_operator.empty() && stage_of_operator[producer] != stage_of_operator[i];
      if (received) return;
      counted[set] = true;
      const graph::Value& first = graph.values[memory.values.front()];
      result[first.producer] += first.meta.nbytes();
    });
  }
  return result;
}

bool is_number(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](unsigned char c) { return std::isdigit(c) != 0; });
}

std::vector<int> all_operators(const Graph& graph) {
  std::vector<int> all(graph.operators.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

bool is_repeatable(const Graph& graph,
                   const std::vector<graph::DifferentiatedRange>& differentiated,
                   const Regions& regions) {
  const auto all = graph::find_regions(all_operators(graph), regions);
  return std::all_of(all.begin(), all.end(), [&](const std::vector<int>& region) {
    return !graph::why_not_repeatable(graph, differentiated, region);
  });
}

}  // namespace

Regions find_module_regions(const Graph& graph, const std::vector<CheckpointedModules>& modules,
                            const std::vector<int>& stage_of_operator) {
  if (modules.empty()) return {};
  const std::vector<Member> members = members_of(graph, modules);
  Regions regions(graph.operators.size(), -1);
  int region = -1, stage = -1, length = 0;  // `length`: how many modules are in the region
  Member before;
  for (size_t i = 0; i < regions.size(); ++i) {
    const int at = stage_of_operator.empty() ? 0 : stage_of_operator[i];
    const Member member = members[i];
    if (member) {
      const bool next = !(member == before);
      const int group = modules[member.list].group;
      const bool open = before && before.list == member.list && at == stage;
      if (!open || (next && group > 0 && length == group)) {
        ++region;
        length = 1;
      } else if (next) {
        ++length;
      }
      regions[i] = region;
    }
    before = member;
    stage = at;
  }
  return region >= 0 ? regions : Regions();
}

Graph with_regions(const Graph& graph, const Regions& regions,
                   const std::vector<int>& stage_of_operator) {
  Graph result = graph;
  if (regions.empty() || !graph.trains()) return result;
  const std::vector<int64_t> kept = input_bytes(graph, regions, stage_of_operator);
  for (size_t i = 0; i < regions.size(); ++i) {
    graph::Cost& cost = result.operators[i].cost;
    if (regions[i] < 0) {
      cost.saved_bytes = std::max(cost.saved_bytes, kept[i]);
    } else {
      cost.saved_bytes = kept[i];
      cost.backward_us += cost.forward_us;
    }
  }
  return result;
}

int64_t largest_region_bytes(const Graph& graph, const Regions& regions) {
  std::map<int, int64_t> bytes;
  for (size_t i = 0; i < regions.size(); ++i) {
    if (regions[i] >= 0) bytes[regions[i]] += graph.operators[i].cost.saved_bytes;
  }
  int64_t largest = 0;
  for (const auto& [region, saved] : bytes) largest = std::max(largest, saved);
  return largest;
}

std::vector<std::string> candidate_modules(const Graph& graph) {
  std::vector<std::string> result;
  for (const Operator& op : graph.operators) {
    if (!op.reads_parameter || op.scope.empty()) continue;
    const std::vector<std::string> paths = enclosing_modules(op.scope);
    const auto numbered = std::find_if(paths.begin(), paths.end(), [](const std::string& path) {
      return is_number(path.substr(path.rfind('.') + 1));
    });
    const std::string& candidate = numbered == paths.end() ? op.scope : *numbered;
    if (std::find(result.begin(), result.end(), candidate) == result.end()) {
      result.push_back(candidate);
    }
  }
  return result;
}

Prediction predict_with(const Graph& graph, const Plan& plan, const StepModel& step,
                        const std::vector<CheckpointedModules>& modules) {
  const Regions regions = find_module_regions(graph, modules, plan.stage_of_operator);
  return predict(
      with_regions(graph, regions, plan.stage_of_operator), plan,
      StepModel(step).largest_region(largest_region_bytes(graph, regions)).regions(regions));
}

namespace {

/// The savings and costs of running a module again, on each rank.
struct Candidate {
  std::string module;
  std::vector<int64_t> freed;  ///< bytes by rank
  double time_us = 0;
};

std::vector<Candidate> find_candidates(const Graph& graph, const Plan& plan, const StepModel& step,
                                       const std::vector<CheckpointedModules>& modules) {
  const Prediction without = predict_with(graph, plan, step, modules);
  const auto differentiated = graph::differentiated_ranges(graph);
  std::vector<Candidate> result;
  for (const std::string& module : candidate_modules(graph)) {
    std::vector<CheckpointedModules> with = modules;
    with.push_back({{module}, 1});
    const Regions regions = find_module_regions(graph, with, plan.stage_of_operator);
    if (!is_repeatable(graph, differentiated, regions)) continue;
    const Prediction predicted = predict_with(graph, plan, step, with);
    Candidate candidate{module, {}, 0};
    for (size_t r = 0; r < predicted.rank_us.size(); ++r) {
      candidate.freed.push_back(without.rank_memory[r] - predicted.rank_memory[r] +
                                predicted.recomputed - without.recomputed);
      candidate.time_us += predicted.rank_us[r] - without.rank_us[r];
    }
    result.push_back(std::move(candidate));
  }
  return result;
}

}  // namespace

std::optional<std::vector<CheckpointedModules>> choose_modules(
    const Graph& graph, const Plan& plan, const StepModel& step, int64_t limit,
    std::vector<CheckpointedModules> modules) {
  std::vector<Candidate> candidates = find_candidates(graph, plan, step, modules);
  for (;;) {
    const Prediction predicted = predict_with(graph, plan, step, modules);
    const auto& memory = predicted.rank_memory;
    const auto most = std::max_element(memory.begin(), memory.end());
    if (*most <= limit) return modules;
    const auto rank = static_cast<size_t>(most - memory.begin());
    const auto value = [&](const Candidate& candidate) {
      return static_cast<double>(candidate.freed[rank]) / std::max(candidate.time_us, 1e-3);
    };
    const auto best = std::max_element(
        candidates.begin(), candidates.end(),
        [&](const Candidate& a, const Candidate& b) { return value(a) < value(b); });
    if (best == candidates.end() || best->freed[rank] <= 0) return std::nullopt;
    modules.push_back({{best->module}, 1});
    candidates.erase(best);
  }
}

void check_repeatable(const Graph& graph, const Regions& regions) {
  graph::check_repeatable(graph, graph::find_regions(all_operators(graph), regions));
}

}  // namespace smp::partitioner
