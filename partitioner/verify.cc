// SPDX-License-Identifier: Apache-2.0
#include "partitioner/verify.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "core/check.h"
#include "partitioner/cuts.h"
#include "partitioner/data_flow.h"

namespace smp::partitioner {
namespace {

using graph::Graph;
using graph::kUndefined;
using graph::Value;
using graph::ValueId;
using graph::ValueKind;

constexpr const char* kBug =
    " A plan that `partition` made never does that; if it was loaded or edited, make it again.";

class PlanVerifier {
 public:
  PlanVerifier(const Graph& graph, const Plan& plan) : graph_(graph), plan_(plan) {
    for (const auto& op : graph.operators) written_.insert(op.writes.begin(), op.writes.end());
  }

  void run() {
    check_ranks();
    check_stages();
    check_cuts();
    check_recomputed();
    collect_needs();
    check_transfers();
    check_owners();
    check_replicas();
    check_ends();
  }

 private:
  template <class... Parts>
  void check(bool condition, const Parts&... parts) const {
    SMP_CHECK(condition, "plan: ", parts..., kBug);
  }

  void check_one_each(const char* what, size_t expected, const char* of, size_t got) const {
    check(got == expected, "expected a ", what, " for each of the ", expected, " ", of, ", got ",
          got, ".");
  }

  int stage_of(int index) const { return plan_.stage_of_operator[index]; }

  void check_ranks() const {
    check(plan_.stages() >= 1, "expected at least 1 stage, got ", plan_.stages(), ".");
    const std::set<int> ranks(plan_.rank_of_stage.begin(), plan_.rank_of_stage.end());
    check(*ranks.begin() == 0 && *ranks.rbegin() == static_cast<int>(ranks.size()) - 1,
          "expected a stage for each of the ranks 0 to ", *ranks.rbegin(), ", got stages for ",
          ranks.size(), " ranks from ", *ranks.begin(), " on.");
  }

  void check_stages() const {
    const size_t operators = graph_.operators.size();
    check_one_each("stage", operators, "operators", plan_.stage_of_operator.size());
    check_one_each("reason", operators, "operators", plan_.reason_of_operator.size());
    int previous = 0;
    for (size_t i = 0; i < operators; ++i) {
      const int stage = stage_of(static_cast<int>(i));
      check(stage >= previous && stage < plan_.stages(), "operator ", i, ": expected a stage from ",
            previous, " to ", plan_.stages() - 1, ", got ", stage, ".");
      previous = stage;
    }
  }

  void check_cuts() const {
    for (int i = 0; i + 1 < static_cast<int>(graph_.operators.size()); ++i) {
      if (stage_of(i) == stage_of(i + 1)) continue;
      const core::Refusal refusal = why_illegal(graph_, i);
      if (!refusal) continue;
      check(false, "the cut between operators ", i, " and ", i + 1, " is illegal: ", *refusal, ".");
    }
  }

  /// Checks that operators run twice give the same twice: from values that every rank has, with no
  /// other effect.
  void check_recomputed() {
    for (const Recomputed& again : plan_.recomputed) {
      const int index = again.operator_index;
      check(index >= 0 && index < static_cast<int>(graph_.operators.size()) && again.stage >= 0 &&
                again.stage < plan_.stages() && stage_of(index) < again.stage,
            "operator ", index, " is recomputed on stage ", again.stage,
            ", which is not a later one than its own.");
      const graph::Operator& op = graph_.operators[index];
      const std::string what = describe_operator(graph_, index);
      check(op.writes.empty() && op.random_ordinal < 0, what, " is recomputed on stage ",
            again.stage, ", but it writes a tensor or draws random numbers.");
      for_each_argument(op, [&](ValueId value) { check_repeated_argument(what, again, value); });
      for_each_result(op, [&](ValueId value) {
        check(!graph_.values[value].meta.requires_grad && !is_written(value), what,
              " is recomputed on stage ", again.stage,
              ", but its result needs a gradient or is written.");
        made_again_.insert({value, again.stage});
      });
    }
  }

  void check_repeated_argument(const std::string& what, const Recomputed& again, ValueId value) {
    const bool here = graph_.values[value].kind == ValueKind::kResult
                          ? is_made(value, again.stage)
                          : !has_owner(graph_.values[value]);
    check(here && !is_written(value), what, " is recomputed on stage ", again.stage, ", but ",
          describe_value(graph_, value), " is not there as it was, or is written.");
  }

  bool is_written(ValueId value) const {
    return written_.count(graph_.values[value].alias_set) > 0;
  }

  /// True if an operator that runs on the stage makes the value.
  bool is_made(ValueId value, int stage) const {
    return stage_of(graph_.values[value].producer) == stage ||
           made_again_.count({value, stage}) > 0;
  }

  /// Notes the stages that read each value, from operators and from backward roots.
  void collect_needs() {
    for (size_t i = 0; i < graph_.operators.size(); ++i) {
      const int stage = stage_of(static_cast<int>(i));
      for_each_argument(graph_.operators[i], [&](ValueId value) {
        if (made_again_.count({value, stage}) == 0) needs_[value].insert(stage);
      });
    }
    const size_t roots = graph_.roots.size();
    check_one_each("stage", roots, "backward roots", plan_.stage_of_root.size());
    for (size_t r = 0; r < roots; ++r) {
      const int stage = plan_.stage_of_root[r];
      for (ValueId value : {graph_.roots[r].value, graph_.roots[r].gradient}) {
        if (value == kUndefined || made_again_.count({value, stage}) > 0) continue;
        const bool made = graph_.values[value].producer >= 0;
        if (made || has_owner(graph_.values[value])) needs_[value].insert(stage);
      }
    }
  }

  int home(ValueId value) const {
    const int producer = graph_.values[value].producer;
    return producer < 0 ? 0 : stage_of(producer);
  }

  void check_transfers() const {
    std::map<ValueId, std::vector<Transfer>> chains;
    ValueId last = kUndefined;
    for (const Transfer& hop : plan_.transfers) {
      check(hop.value >= 0 && hop.value < static_cast<ValueId>(graph_.values.size()) &&
                graph_.values[hop.value].kind == ValueKind::kResult,
            "transfer of %", hop.value, ": only results of operators cross between stages.");
      check(hop.value >= last, "transfers are ordered by value, but %", hop.value, " comes after %",
            last, ".");
      check(!hop.needs_gradient ||
                (graph_.trains() && !at::isIntegralType(graph_.values[hop.value].meta.dtype, true)),
            "transfer of %", hop.value, ": it can have no gradient.");
      last = hop.value;
      chains[hop.value].push_back(hop);
    }
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      if (graph_.values[v].kind == ValueKind::kResult) check_chain(static_cast<ValueId>(v), chains);
    }
  }

  void check_chain(ValueId value, const std::map<ValueId, std::vector<Transfer>>& chains) const {
    std::set<int> missing;
    if (const auto needs = needs_.find(value); needs != needs_.end()) missing = needs->second;
    missing.erase(home(value));
    check(missing.empty() || *missing.begin() > home(value), "%", value, " is needed by stage ",
          missing.empty() ? 0 : *missing.begin(), " before stage ", home(value), " makes it.");
    int at = home(value);
    if (const auto chain = chains.find(value); chain != chains.end()) {
      for (const Transfer& hop : chain->second) {
        check(hop.from == at && hop.to > at, "transfer of %", value,
              ": expected it to go on from stage ", at, " to a later one, got ", hop.from, " -> ",
              hop.to, ".");
        check(missing.erase(hop.to) == 1, "transfer of %", value, ": stage ", hop.to,
              " does not use it.");
        check(missing.empty() || *missing.begin() > hop.to, "transfer of %", value,
              ": it passes stage ", missing.empty() ? 0 : *missing.begin(), ", which uses it.");
        at = hop.to;
      }
    }
    check(missing.empty(), "stage ", missing.empty() ? 0 : *missing.begin(), " uses %", value,
          " of stage ", home(value), ", but no transfer brings it there.");
  }

  int owner_of(ValueId value) const {
    const auto owner = plan_.owner.find(graph_.values[value].name);
    check(owner != plan_.owner.end(), describe_value(graph_, value), " has no owner.");
    check(owner->second >= 0 && owner->second < plan_.stages(), describe_value(graph_, value),
          ": expected an owner from 0 to ", plan_.stages() - 1, ", got ", owner->second, ".");
    return owner->second;
  }

  void check_owners() const {
    std::set<std::string> known;
    std::map<int, std::vector<ValueId>> owned;  // owned values by alias set
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      const auto id = static_cast<ValueId>(v);
      if (!has_owner(graph_.values[v])) continue;
      known.insert(graph_.values[v].name);
      if (needs_.count(id) == 0) continue;
      owner_of(id);
      owned[graph_.values[v].alias_set].push_back(id);
    }
    for (const auto& [name, stage] : plan_.owner) {
      check(known.count(name) != 0, "owner of \"", name,
            "\": the graph has no such parameter or buffer (stage ", stage, ").");
    }
    for (size_t i = 0; i < graph_.operators.size(); ++i) {
      for (int set : graph_.operators[i].writes) check_write(static_cast<int>(i), owned[set]);
    }
  }

  /// An operator writes only on the stage that owns the written tensor.
  void check_write(int index, const std::vector<ValueId>& written) const {
    for (ValueId value : written) {
      check(owner_of(value) == stage_of(index), describe_value(graph_, value), " is written by ",
            describe_operator(graph_, index), " on stage ", stage_of(index), ", but stage ",
            owner_of(value), " owns it.");
    }
  }

  void check_replicas() const {
    std::map<std::pair<ValueId, int>, const Replica*> replicas;
    for (const Replica& replica : plan_.replicas) {
      check(replica.value >= 0 && replica.value < static_cast<ValueId>(graph_.values.size()) &&
                has_owner(graph_.values[replica.value]),
            "replica of %", replica.value, ": only parameters and buffers have replicas.");
      const std::string name = describe_value(graph_, replica.value);
      check(replica.owner == owner_of(replica.value), "replica of ", name, " on stage ",
            replica.stage, ": expected owner ", owner_of(replica.value), ", got ", replica.owner,
            ".");
      check(replicas.emplace(std::make_pair(replica.value, replica.stage), &replica).second,
            "two replicas of ", name, " on stage ", replica.stage, ".");
    }
    for (const auto& [key, replica] : replicas) {
      const auto needs = needs_.find(key.first);
      check(key.second != replica->owner && needs != needs_.end() &&
                needs->second.count(key.second) != 0,
            "replica of ", describe_value(graph_, key.first), ": stage ", key.second,
            " does not read it, or owns it.");
      check_gradient_way(*replica, replicas);
    }
    for (const auto& [value, stages] : needs_) {
      if (!has_owner(graph_.values[value])) continue;
      for (int stage : stages) {
        check(stage == owner_of(value) || replicas.count({value, stage}) != 0, "stage ", stage,
              " reads ", describe_value(graph_, value), " of stage ", owner_of(value),
              ", but has no replica of it.");
      }
    }
  }

  void check_gradient_way(const Replica& replica,
                          const std::map<std::pair<ValueId, int>, const Replica*>& replicas) const {
    const auto next = replicas.find({replica.value, replica.gradient_to});
    const bool relayed = next != replicas.end() && next->second->needs_gradient;
    const bool to_owner = replica.gradient_to == replica.owner;
    check(to_owner || (relayed && replica.needs_gradient), "replica of ",
          describe_value(graph_, replica.value), " on stage ", replica.stage,
          ": its gradient goes to stage ", replica.gradient_to, ", which has none to add.");
    check(!replica.needs_gradient || replica.gradient_to < replica.stage, "replica of ",
          describe_value(graph_, replica.value), " on stage ", replica.stage,
          ": its gradient goes to stage ", replica.gradient_to, ", which is not an earlier one.");
  }

  /// Outputs and roots are taken after the last write to their storage.
  void check_ends() const {
    check_one_each("stage", graph_.outputs.size(), "outputs", plan_.stage_of_output.size());
    for (size_t i = 0; i < graph_.outputs.size(); ++i) {
      if (graph_.outputs[i] == kUndefined) continue;
      check_end("output", i, graph_.outputs[i], plan_.stage_of_output[i]);
    }
    for (size_t r = 0; r < graph_.roots.size(); ++r) {
      check_end("root", r, graph_.roots[r].value, plan_.stage_of_root[r]);
    }
  }

  void check_end(const char* what, size_t index, ValueId value, int stage) const {
    int complete = home(value);
    for (size_t i = 0; i < graph_.operators.size(); ++i) {
      for (int set : graph_.operators[i].writes) {
        if (set != graph_.values[value].alias_set) continue;
        complete = std::max(complete, stage_of(static_cast<int>(i)));
      }
    }
    const bool owned = has_owner(graph_.values[value]);
    const int expected = owned && std::string(what) == "output" ? owner_of(value) : complete;
    const bool later_root =
        std::string(what) == "root" && stage > expected && stage < plan_.stages();
    check(stage == expected || later_root, what, " ", index, ": expected stage ", expected,
          ", where it is complete, got ", stage, ".");
  }

  const Graph& graph_;
  const Plan& plan_;
  std::set<int> written_;                         ///< alias sets
  std::set<std::pair<ValueId, int>> made_again_;  ///< recomputed, with the stage
  std::map<ValueId, std::set<int>> needs_;
};

}  // namespace

void verify_plan(const Graph& graph, const Plan& plan) { PlanVerifier(graph, plan).run(); }

}  // namespace smp::partitioner
