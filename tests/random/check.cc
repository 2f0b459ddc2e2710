// SPDX-License-Identifier: Apache-2.0
#include "tests/random/check.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "partitioner/complete.h"
#include "partitioner/cuts.h"
#include "partitioner/data_flow.h"
#include "partitioner/verify.h"
#include "pipeline/generators.h"
#include "tests/random/runs.h"

namespace smp::random_programs {
namespace {

using graph::Graph;
using graph::Operator;
using graph::ValueId;
using graph::ValueKind;
using partitioner::Plan;

constexpr int kMostStages = 4;

/// Gives values other alias sets and translates the writes of operators: the sets of the arguments
/// that they write.
void set_aliases(Graph& graph, const std::vector<int>& alias_sets) {
  for (Operator& op : graph.operators) {
    c10::SmallVector<int, 1> writes;
    partitioner::for_each_argument(op, [&](ValueId value) {
      const int set = graph.values[value].alias_set;
      if (std::find(op.writes.begin(), op.writes.end(), set) == op.writes.end()) return;
      writes.push_back(alias_sets[value]);
    });
    op.writes = writes;
  }
  for (size_t v = 0; v < graph.values.size(); ++v) graph.values[v].alias_set = alias_sets[v];
  graph.alias_sets = 1 + *std::max_element(alias_sets.begin(), alias_sets.end());
}

Graph with_storages_apart(Graph graph) {
  std::vector<int> sets;
  for (size_t v = 0; v < graph.values.size(); ++v) sets.push_back(static_cast<int>(v));
  set_aliases(graph, sets);
  return graph;
}

Graph with_leaf_views_apart(Graph graph) {
  std::vector<int> sets;
  for (const graph::Value& value : graph.values) {
    const bool leaf = value.kind != ValueKind::kResult;
    sets.push_back(leaf ? graph.alias_sets + static_cast<int>(sets.size()) : value.alias_set);
  }
  set_aliases(graph, sets);
  return graph;
}

Graph without_writes(Graph graph) {
  for (Operator& op : graph.operators) op.writes.clear();
  return graph;
}

Graph without_one_write(Graph graph, Random& random) {
  std::vector<Operator*> writers;
  for (Operator& op : graph.operators) {
    if (!op.writes.empty()) writers.push_back(&op);
  }
  if (!writers.empty()) {
    writers[random.below(static_cast<int64_t>(writers.size()))]->writes.clear();
  }
  return graph;
}

/// Undoes the copies of roots that were written after `backward`.
Graph with_late_roots(Graph graph) {
  const auto latest = [&](ValueId& root) {
    if (root == graph::kUndefined) return;
    const int producer = graph.values[root].producer;
    if (producer < 0 || graph.operators[producer].name() != "aten::clone") return;
    const graph::Value& source = graph.values[graph.operators[producer].arguments[0].values[0]];
    for (size_t v = 0; v < graph.values.size(); ++v) {
      const graph::Value& value = graph.values[v];
      const bool same = value.alias_set == source.alias_set && value.meta == source.meta;
      if (same) root = static_cast<ValueId>(v);
    }
  };
  for (graph::BackwardRoot& root : graph.roots) {
    latest(root.value);
    latest(root.gradient);
  }
  return graph;
}

Graph with_backward_at_the_end(Graph graph) {
  for (Operator& op : graph.operators) op.mode.after_backward = false;
  return graph;
}

/// The graph that the planner and the stages believe in.
Graph believed(const Graph& graph, Fault fault, Random& random) {
  switch (fault) {
    case Fault::kNoWrites:
      return without_writes(graph);
    case Fault::kOneWriteLost:
      return without_one_write(graph, random);
    case Fault::kStoragesApart:
      return with_storages_apart(graph);
    case Fault::kLeafViewsApart:
      return with_leaf_views_apart(graph);
    case Fault::kLateRoots:
      return with_late_roots(graph);
    case Fault::kLateWrites:
      return with_backward_at_the_end(graph);
    default:
      return graph;
  }
}

/// Up to four stages between cuts chosen among those that are legal.
std::vector<int> random_stages(const std::vector<bool>& legal, Random& random) {
  std::vector<size_t> cuts;
  for (size_t i = 0; i < legal.size(); ++i) {
    if (legal[i]) cuts.push_back(i);
  }
  const auto wanted = static_cast<size_t>(random.below(random.chance(15) ? 2 : kMostStages));
  while (cuts.size() > wanted) {
    cuts.erase(cuts.begin() + random.below(static_cast<int64_t>(cuts.size())));
  }
  std::vector<int> stages(legal.size() + 1, 0);
  for (size_t cut : cuts) {
    for (size_t i = cut + 1; i < stages.size(); ++i) ++stages[i];
  }
  return stages;
}

/// A rank for each stage, often its own; every rank gets a stage.
std::vector<int> random_ranks(int stages, Random& random) {
  std::vector<int> ranks(stages);
  std::iota(ranks.begin(), ranks.end(), 0);
  if (random.chance(40)) return ranks;
  if (stages % 2 == 0 && random.chance(40)) {  // schedules with several stages a rank
    using Options = pipeline::ScheduleOptions;
    return (random.chance(50) ? Options::v_shaped(stages / 2, 1)
                              : Options::looped(stages / 2, 2, 1))
        .rank_of_stage();
  }
  const int64_t count = 1 + random.below(stages);
  for (int64_t s = count; s < stages; ++s) ranks[s] = static_cast<int>(random.below(count));
  for (size_t s = ranks.size(); s-- > 1;) {
    std::swap(ranks[s], ranks[random.below(static_cast<int64_t>(s) + 1)]);
  }
  return ranks;
}

/// Sometimes the rank of the first stage owns all parameters, also those it does not read.
std::map<std::string, int> random_owners(const Graph& graph, int rank, Random& random) {
  std::map<std::string, int> owners;
  if (!random.chance(20)) return owners;
  for (const graph::Value& value : graph.values) {
    if (value.kind == ValueKind::kParameter) owners[value.name] = rank;
  }
  return owners;
}

Plan plan_of(const Graph& graph, const std::vector<int>& ranks,
             const std::vector<int>& stage_of_operator, const std::map<std::string, int>& owners) {
  Plan plan = partitioner::complete_plan(graph, ranks, stage_of_operator, owners);
  plan.reason_of_operator.assign(graph.operators.size(), "at random");
  return plan;
}

void plant(Plan& plan, Fault fault, const Graph& graph) {
  if (fault == Fault::kStaleHops) {
    for (partitioner::Transfer& hop : plan.transfers) {
      hop.from = plan.stage_of_operator[graph.values[hop.value].producer];
    }
  } else if (fault == Fault::kEarlyEnds) {
    const Plan early =
        plan_of(without_writes(graph), plan.rank_of_stage, plan.stage_of_operator, {});
    plan.stage_of_output = early.stage_of_output;
    plan.stage_of_root = early.stage_of_root;
  } else if (fault == Fault::kGradientsApart) {
    const Plan apart =
        plan_of(with_storages_apart(graph), plan.rank_of_stage, plan.stage_of_operator, {});
    for (size_t i = 0; i < plan.transfers.size() && i < apart.transfers.size(); ++i) {
      plan.transfers[i].needs_gradient = apart.transfers[i].needs_gradient;
    }
  }
}

std::string message_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours == nullptr ? error.what() : ours->what_without_backtrace();
}

/// The text of the error that `action` throws; empty if there is none.
template <class Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const std::exception& error) {
    const std::string text = message_of(error);
    return text.empty() ? "an exception" : text;
  }
  return "";
}

/// Whatever a thing does wrong under `kNone`, from the capture on.
std::string run_and_compare(const Program& program, const Trial& trial, const Graph& graph,
                            const Plan& plan, const Outcome& expected) {
  std::string text;
  const std::string error = error_of([&] {
    const Outcome got = run_pipeline(program, trial, graph, plan);
    text = difference(got, expected);
  });
  if (!error.empty()) text = "the pipeline threw: " + error;
  return text.empty() ? text : text + "\n" + graph.to_string() + plan.to_string();
}

void judge(const Program& program, const Trial& trial, Fault fault, uint64_t cut_seed,
           const Outcome& expected, Verdict& verdict) {
  Random random(program.seed * 1000003 + cut_seed);
  const std::unique_ptr<Graph> captured = capture(program, trial);
  Graph graph = believed(*captured, fault, random);
  for (graph::Value& value :
       graph.values) {  // a run that does not know of a write spoils its inputs
    if (value.content.defined()) value.content = value.content.clone();
  }
  verdict.operators = static_cast<int>(graph.operators.size());
  if (graph.operators.empty()) return;
  std::vector<bool> legal = partitioner::legal_cuts(graph);
  if (fault == Fault::kEveryCut) legal.assign(legal.size(), true);
  const std::vector<int> stages = random_stages(legal, random);
  const std::vector<int> ranks = random_ranks(stages.back() + 1, random);
  Plan plan = plan_of(graph, ranks, stages, random_owners(graph, ranks[0], random));
  plant(plan, fault, *captured);
  verdict.stages = plan.stages();
  verdict.transfers = static_cast<int>(plan.transfers.size());
  verdict.schedule = schedule_of(trial, graph, plan).name;
  verdict.rejection = error_of([&] { partitioner::verify_plan(*captured, plan); });
  verdict.failure = run_and_compare(program, trial, graph, plan, expected);
  if (fault != Fault::kNone && verdict.rejection.empty() && !verdict.failure.empty()) {
    verdict.accepted_failure = run_and_compare(program, trial, *captured, plan, expected);
  }
  if (fault != Fault::kNone || !verdict.failure.empty()) return;
  if (random.chance(25)) verdict.failure = guard(program, trial, *captured);
}

/// The program without an instruction; who used its results uses its first argument instead.
bool drop_instruction(Program& program, size_t index) {
  const Instruction dropped = program.instructions[index];
  if (static_cast<int>(index) < program.backward_after) --program.backward_after;
  if (dropped.arguments.empty() && dropped.results > 0) return false;
  const auto replace = [&](int& use) {
    if (use < dropped.first_result || use >= dropped.first_result + dropped.results) return;
    use = dropped.arguments[0];
  };
  program.instructions.erase(program.instructions.begin() + static_cast<std::ptrdiff_t>(index));
  for (Instruction& instruction : program.instructions) {
    for (int& argument : instruction.arguments) replace(argument);
  }
  for (int& output : program.outputs) replace(output);
  for (Root& root : program.roots) {
    replace(root.value);
    if (root.gradient >= 0) replace(root.gradient);
  }
  return true;
}

/// Drops the items of a list that can be dropped, the last first.
template <class T, class Fails>
bool shrink_list(Program& program, std::vector<T> Program::*list, const Fails& fails) {
  bool smaller = false;
  for (size_t i = (program.*list).size(); i-- > 0;) {
    Program candidate = program;
    (candidate.*list).erase((candidate.*list).begin() + static_cast<std::ptrdiff_t>(i));
    if (!fails(candidate)) continue;
    program = candidate;
    smaller = true;
  }
  return smaller;
}

}  // namespace

const char* to_string(Fault fault) {
  switch (fault) {
    case Fault::kNone:
      return "none";
    case Fault::kEveryCut:
      return "every cut is taken for legal";
    case Fault::kNoWrites:
      return "writes are unknown";
    case Fault::kOneWriteLost:
      return "one operator's writes are unknown";
    case Fault::kStoragesApart:
      return "views are taken for copies";
    case Fault::kLeafViewsApart:
      return "views of inputs and buffers are taken for copies";
    case Fault::kStaleHops:
      return "values travel from their producers";
    case Fault::kEarlyEnds:
      return "outputs and roots are taken where they are made";
    case Fault::kGradientsApart:
      return "gradients do not go through views";
    case Fault::kLateRoots:
      return "what backward was called on is taken as it is at the end";
    case Fault::kLateWrites:
      return "what is written after backward is written in place";
  }
  return "";
}

Verdict check(const Program& program, Fault fault, uint64_t cut_seed) {
  at::set_num_threads(1);  // the ranks' threads have one, too
  const Trial trial = Trial::of(program.seed);
  Verdict verdict;
  Outcome expected;
  verdict.skipped = error_of([&] { expected = run_eager(program, trial); });
  if (!verdict.skipped.empty()) return verdict;
  if (has_non_finite(expected)) {
    verdict.skipped = "not finite";
    return verdict;
  }
  const std::string error =
      error_of([&] { judge(program, trial, fault, cut_seed, expected, verdict); });
  if (!error.empty()) verdict.failure = "threw: " + error;
  return verdict;
}

Program shrink(Program program, const std::function<bool(const Program&)>& fails) {
  bool smaller = true;
  while (smaller) {
    smaller = shrink_list(program, &Program::outputs, fails);
    smaller |= shrink_list(program, &Program::roots, fails);
    for (size_t i = program.instructions.size(); i-- > 0;) {
      Program candidate = program;
      if (!drop_instruction(candidate, i) || !fails(candidate)) continue;
      program = candidate;
      smaller = true;
    }
  }
  return program;
}

}  // namespace smp::random_programs
