// SPDX-License-Identifier: Apache-2.0
#include "partitioner/complete.h"

#include <algorithm>
#include <set>
#include <utility>

#include "partitioner/data_flow.h"
#include "partitioner/gradient_flow.h"
#include "partitioner/recompute.h"

namespace smp::partitioner {
namespace {

using graph::Graph;
using graph::kUndefined;
using graph::Value;
using graph::ValueId;
using graph::ValueKind;

class Completer {
 public:
  Completer(const Graph& graph, std::vector<int> rank_of_stage, std::vector<int> stage_of_operator,
            const std::map<std::string, int>& fixed_owner)
      : graph_(graph),
        fixed_owner_(fixed_owner),
        uses_(value_uses(graph)),
        last_writers_(last_writers(graph)),
        gradients_(graph) {
    const int stages = static_cast<int>(rank_of_stage.size());
    plan_.rank_of_stage = std::move(rank_of_stage);
    plan_.stage_of_operator = std::move(stage_of_operator);
    last_operator_.assign(stages, -1);
    for (size_t i = 0; i < plan_.stage_of_operator.size(); ++i) {
      last_operator_[stage_of(static_cast<int>(i))] = static_cast<int>(i);
    }
    for (int stage = 1; stage < stages; ++stage) {  // an empty stage ends where the one before does
      last_operator_[stage] = std::max(last_operator_[stage], last_operator_[stage - 1]);
    }
  }

  Plan run() {
    find_recomputed();
    for (size_t v = 0; v < graph_.values.size(); ++v) {
      const auto value = static_cast<ValueId>(v);
      if (graph_.values[v].kind == ValueKind::kResult) add_transfers(value);
      if (has_owner(graph_.values[v])) add_owner(value);
    }
    for (ValueId value : graph_.outputs) plan_.stage_of_output.push_back(stage_of_output(value));
    for (int index : root_operators(graph_, last_writers_)) {
      plan_.stage_of_root.push_back(index < 0 ? 0 : stage_of(index));
    }
    return std::move(plan_);
  }

 private:
  int stage_of(int operator_index) const { return plan_.stage_of_operator[operator_index]; }

  /// The stages that use a value, ascending.
  std::vector<int> using_stages(ValueId value) const {
    std::vector<int> stages;
    for (int index : uses_[value]) {
      if (stages.empty() || stages.back() != stage_of(index)) stages.push_back(stage_of(index));
    }
    return stages;
  }

  /// Chooses, stage by stage, the results of earlier stages that are made again instead of sent.
  void find_recomputed() {
    const std::vector<bool> repeatable = repeatable_operators(graph_);
    if (std::find(repeatable.begin(), repeatable.end(), true) == repeatable.end()) return;
    runs_.assign(plan_.stages(), {});
    for (int stage = 1; stage < plan_.stages(); ++stage) find_recomputed(repeatable, stage);
  }

  void find_recomputed(const std::vector<bool>& repeatable, int stage) {
    std::vector<bool> have(graph_.operators.size(), false);
    std::set<int>& again = runs_[stage];
    const size_t end = graph_.operators.size();
    for (size_t i = 0; i < end; ++i) have[i] = stage_of(static_cast<int>(i)) == stage;
    for (size_t i = 0; i < end; ++i) {
      if (stage_of(static_cast<int>(i)) != stage) continue;
      for_each_argument(graph_.operators[i], [&](ValueId value) {
        const int producer = graph_.values[value].producer;
        if (producer < 0 || have[producer] || !repeatable[producer]) return;
        for (int index : cheap_recomputation(graph_, repeatable, value, have)) {
          have[index] = true;
          again.insert(index);
        }
      });
    }
    for (int index : again) plan_.recomputed.push_back({index, stage});
  }

  bool recomputed(ValueId value, int stage) const {
    return !runs_.empty() && runs_[stage].count(graph_.values[value].producer) > 0;
  }

  void add_transfers(ValueId value) {
    Transfer hop;
    hop.value = value;
    hop.from = stage_of(graph_.values[value].producer);
    const std::vector<int>& gradients = gradients_.gradient_uses(value);
    for (int stage : using_stages(value)) {
      if (stage <= hop.from || recomputed(value, stage)) continue;
      hop.to = stage;
      hop.needs_gradient = !gradients.empty() && stage_of(gradients.front()) >= hop.to &&
                           gradients_.requires_grad_since(value) <= last_operator_[hop.from];
      plan_.transfers.push_back(hop);
      hop.from = stage;
    }
  }

  int owner_of(ValueId value, const std::vector<int>& readers) const {
    const int writer = last_writers_[value];
    const auto fixed = fixed_owner_.find(graph_.values[value].name);
    if (fixed != fixed_owner_.end()) return stage_on_rank(fixed->second, value, readers);
    if (writer >= 0) return stage_of(writer);
    return readers.empty() ? 0 : readers.front();
  }

  /// Chooses a stage among a rank's: the one that writes a tensor, else the first that reads it,
  /// else the first. Gradients travel to earlier stages only, so a reader after the first stage
  /// that has one will not do.
  int stage_on_rank(int rank, ValueId value, const std::vector<int>& readers) const {
    const auto is_on_rank = [&](int stage) { return plan_.rank_of_stage[stage] == rank; };
    const int writer = last_writers_[value];
    if (writer >= 0 && is_on_rank(stage_of(writer))) return stage_of(writer);
    const std::vector<int>& gradients = gradients_.gradient_uses(value);
    const int latest = gradients.empty() ? plan_.stages() : stage_of(gradients.back());
    const auto reader = std::find_if(readers.begin(), readers.end(), [&](int stage) {
      return is_on_rank(stage) && stage <= latest;
    });
    if (reader != readers.end()) return *reader;
    const auto first = std::find(plan_.rank_of_stage.begin(), plan_.rank_of_stage.end(), rank);
    return static_cast<int>(first - plan_.rank_of_stage.begin());
  }

  bool is_output(ValueId value) const {
    return std::find(graph_.outputs.begin(), graph_.outputs.end(), value) != graph_.outputs.end();
  }

  void add_owner(ValueId value) {
    const std::vector<int> readers = using_stages(value);
    if (readers.empty() && last_writers_[value] < 0 && !is_output(value)) return;
    Replica replica;
    replica.value = value;
    replica.owner = owner_of(value, readers);
    plan_.owner[graph_.values[value].name] = replica.owner;
    int previous = replica.owner;
    for (int stage : readers) {
      if (stage == replica.owner) continue;
      replica.stage = stage;
      replica.needs_gradient = has_gradient(value, stage);
      replica.gradient_to = replica.needs_gradient ? previous : replica.owner;
      if (replica.needs_gradient) previous = stage;
      plan_.replicas.push_back(replica);
    }
  }

  bool has_gradient(ValueId value, int stage) const {
    const std::vector<int>& gradients = gradients_.gradient_uses(value);
    return std::any_of(gradients.begin(), gradients.end(),
                       [&](int index) { return stage_of(index) == stage; });
  }

  int stage_of_output(ValueId value) const {
    if (value == kUndefined) return 0;
    const auto owner = plan_.owner.find(graph_.values[value].name);
    if (has_owner(graph_.values[value]) && owner != plan_.owner.end()) return owner->second;
    const int writer = last_writers_[value];
    return writer < 0 ? 0 : stage_of(writer);
  }

  const Graph& graph_;
  const std::map<std::string, int>& fixed_owner_;
  const std::vector<std::vector<int>> uses_;
  const std::vector<int> last_writers_;
  const GradientFlow gradients_;
  std::vector<std::set<int>> runs_;  ///< recomputed by each stage; empty if none are
  std::vector<int> last_operator_;   ///< per stage, the last of it and all earlier stages
  Plan plan_;
};

}  // namespace

Plan complete_plan(const Graph& graph, std::vector<int> rank_of_stage,
                   std::vector<int> stage_of_operator,
                   const std::map<std::string, int>& fixed_owner) {
  return Completer(graph, std::move(rank_of_stage), std::move(stage_of_operator), fixed_owner)
      .run();
}

}  // namespace smp::partitioner
