// SPDX-License-Identifier: Apache-2.0
#include "partitioner/cuts.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "graph/alias_analysis.h"
#include "graph/autocast.h"
#include "graph/differentiate.h"
#include "graph/memory_layout.h"
#include "graph/requires_grad.h"
#include "graph/visit.h"
#include "partitioner/data_flow.h"

namespace smp::partitioner {
namespace {

using graph::Graph;
using graph::kUndefined;
using graph::ValueId;
using graph::ValueKind;

/// Between which operators one alias set is used.
struct StorageUse {
  int first_touch = -1;
  int last_touch = -1;

  void touch(int index) {
    first_touch = first_touch < 0 ? index : std::min(first_touch, index);
    last_touch = std::max(last_touch, index);
  }
};

class Storages {
 public:
  explicit Storages(const Graph& graph)
      : graph_(graph),
        aliases_(graph),
        uses_(graph.alias_sets),
        last_use_(graph.values.size(), -1) {
    for (size_t i = 0; i < graph.operators.size(); ++i) add_operator(static_cast<int>(i));
    for (ValueId value : graph.outputs) use_at_end(value);
    const std::vector<int> root_operator = root_operators(graph, last_writers(graph));
    for (size_t r = 0; r < graph.roots.size(); ++r) {
      use_by_root(graph.roots[r].value, root_operator[r]);
      use_by_root(graph.roots[r].gradient, root_operator[r]);
    }
  }

  int size() const { return static_cast<int>(uses_.size()); }

  /// How many views of a storage that is written a value stands for: as a copy, one whose elements
  /// overlap is another tensor to a backward pass.
  int views_of(ValueId value) const {
    const graph::TensorMeta& meta = graph_.values[value].meta;
    return graph::overlaps_itself(meta.sizes, meta.strides) ? 2 : 1;
  }

  /// The values of a set that exist before cut `i` and are used after it.
  std::vector<ValueId> crossing(int set, int i) const {
    std::vector<ValueId> result;
    for (ValueId value : aliases_.set(set).values) {
      if (graph_.values[value].producer <= i && last_use_[value] > i) result.push_back(value);
    }
    return result;
  }

  /// The rule, for one storage and one cut.
  bool violated(int set, int i) const {
    const StorageUse& use = uses_[set];
    const auto& memory = aliases_.set(set);
    if (!memory.is_written()) return false;
    if (memory.outlives_run()) return use.first_touch <= i && i < use.last_touch;
    int views = 0;
    for (ValueId value : crossing(set, i)) views += views_of(value);
    return memory.last_writer() > i && views >= 2;
  }

  /// Calls `visit(first, last)` for ranges of cuts that the set makes illegal.
  template <class Visitor>
  void for_each_illegal_range(int set, const Visitor& visit) const {
    const StorageUse& use = uses_[set];
    const auto& memory = aliases_.set(set);
    if (!memory.is_written()) return;
    if (memory.outlives_run()) {
      visit(use.first_touch, use.last_touch - 1);
      return;
    }
    // Each value counts at the cuts from its producer up to its last use or the last write.
    std::vector<std::pair<int, int>> changes;
    for (ValueId value : memory.values) {
      const int first = graph_.values[value].producer;
      const int end = std::min(last_use_[value], memory.last_writer());
      if (first >= end) continue;
      changes.emplace_back(first, +views_of(value));
      changes.emplace_back(end, -views_of(value));
    }
    std::sort(changes.begin(), changes.end());
    int crossing = 0;
    for (size_t c = 0; c + 1 < changes.size(); ++c) {
      crossing += changes[c].second;
      if (crossing >= 2) visit(changes[c].first, changes[c + 1].first - 1);
    }
  }

  std::string reason(int set, int i) const {
    const StorageUse& use = uses_[set];
    const auto& memory = aliases_.set(set);
    const std::string writer = describe_operator(graph_, memory.last_writer());
    if (memory.outlives_run()) {
      return fmt::format("{} is written by {}, so all its users, operators {} to {}, stay together",
                         describe_value(graph_, memory.base), writer, use.first_touch,
                         use.last_touch);
    }
    const std::vector<ValueId> values = crossing(set, i);
    if (values.size() == 1) {
      return fmt::format("{} writes {}, whose elements overlap, and it is used after the cut",
                         writer, describe_value(graph_, values[0]));
    }
    return fmt::format(
        "{} writes the storage that {} and {} share, and both are used after the cut", writer,
        describe_value(graph_, values[0]), describe_value(graph_, values[1]));
  }

 private:
  void add_operator(int index) {
    const graph::Operator& op = graph_.operators[index];
    const auto touch = [&](ValueId value) {
      const int set = graph_.values[value].alias_set;
      if (set >= 0) uses_[set].touch(index);
    };
    for_each_argument(op, [&](ValueId value) {
      last_use_[value] = index;
      touch(value);
    });
    for_each_result(op, touch);
    for (int set : op.writes) uses_[set].touch(index);
  }

  void use_at_end(ValueId value) {
    if (value != kUndefined) last_use_[value] = static_cast<int>(graph_.operators.size());
  }

  /// A backward that starts from a buffer that was written needs the history that it got.
  void use_by_root(ValueId value, int root_operator) {
    if (value == kUndefined) return;
    use_at_end(value);
    const int set = graph_.values[value].alias_set;
    if (set >= 0) uses_[set].touch(std::max(root_operator, 0));
  }

  const Graph& graph_;
  const graph::AliasAnalysis aliases_;
  std::vector<StorageUse> uses_;
  std::vector<int> last_use_;
};

/// Operators that stay together whatever their storages.
struct Together {
  int first;
  int last;
  std::string reason;
};

/// Operators under no_grad that make another view of a tensor in place. Where it is a view already,
/// libtorch takes its history anew from the tensor that it is a view of, which another stage does
/// not have as such.
void add_views_in_place(const Graph& graph, std::vector<Together>& result) {
  std::vector<int> maker;  // operator that made the tensor, whatever wrote it since
  for (const graph::Value& value : graph.values) maker.push_back(value.producer);
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const graph::Operator& op = graph.operators[i];
    for_each_same_tensor(op, [&](ValueId after, ValueId before) {
      maker[after] = maker[before];
      const bool same_view = graph.values[after].meta.strides == graph.values[before].meta.strides;
      if (maker[before] < 0 || same_view || !graph::ends_history(graph, op)) return;
      result.push_back(
          {maker[before], static_cast<int>(i),
           fmt::format("{} makes another view of what {} returned, in place and under no_grad, so "
                       "they stay together",
                       describe_operator(graph, static_cast<int>(i)),
                       describe_operator(graph, maker[before]))});
    });
  }
}

/// Those that read a parameter which autocast casts once for them, so that its gradients meet in
/// the lower precision, those that the step function differentiates, and those of views in place.
std::vector<Together> find_together(const Graph& graph) {
  std::vector<Together> result;
  for (const graph::SharedCast& cast : graph::shared_casts(graph)) {
    result.push_back(
        {cast.first, cast.last,
         fmt::format("{} is cast once for {} and {}, which run under one autocast "
                     "scope, so they stay together",
                     describe_value(graph, cast.parameter), describe_operator(graph, cast.first),
                     describe_operator(graph, cast.last))});
  }
  for (const graph::DifferentiatedRange& range : graph::differentiated_ranges(graph)) {
    result.push_back(
        {range.first, range.last,
         fmt::format("autograd::grad ({}) differentiates what is computed from {} on, "
                     "so they stay together",
                     describe_operator(graph, range.last), describe_operator(graph, range.first))});
  }
  add_views_in_place(graph, result);
  return result;
}

/// The rules that make cuts illegal.
class Rules {
 public:
  explicit Rules(const Graph& graph)
      : storages_(graph), together_(find_together(graph)), operators_(graph.operators.size()) {}

  /// Per cut the first rule that it breaks, -1 if there is none.
  std::vector<int> first_broken() const {
    std::vector<int> result(std::max<size_t>(operators_, 1) - 1, -1);
    const auto note = [&](int rule, int first, int last) {
      for (int i = first; i <= last; ++i) {
        if (result[i] < 0) result[i] = rule;
      }
    };
    for (int set = 0; set < storages_.size(); ++set) {
      storages_.for_each_illegal_range(set, [&](int first, int last) { note(set, first, last); });
    }
    for (size_t t = 0; t < together_.size(); ++t) {
      note(storages_.size() + static_cast<int>(t), together_[t].first, together_[t].last - 1);
    }
    return result;
  }

  bool broken(int rule, int i) const {
    if (rule < storages_.size()) return storages_.violated(rule, i);
    const Together& together = together_[rule - storages_.size()];
    return together.first <= i && i < together.last;
  }

  int size() const { return storages_.size() + static_cast<int>(together_.size()); }

  std::string reason(int rule, int i) const {
    if (rule < storages_.size()) return storages_.reason(rule, i);
    return together_[rule - storages_.size()].reason;
  }

 private:
  Storages storages_;
  std::vector<Together> together_;
  size_t operators_;
};

}  // namespace

std::vector<bool> legal_cuts(const Graph& graph) {
  std::vector<bool> legal;
  for (int rule : Rules(graph).first_broken()) legal.push_back(rule < 0);
  return legal;
}

core::Refusal why_illegal(const Graph& graph, int i) {
  const Rules rules(graph);
  for (int rule = 0; rule < rules.size(); ++rule) {
    if (rules.broken(rule, i)) return rules.reason(rule, i);
  }
  return std::nullopt;
}

std::vector<core::Refusal> why_illegal(const Graph& graph) {
  const Rules rules(graph);
  const std::vector<int> broken = rules.first_broken();
  std::vector<core::Refusal> result(broken.size());
  for (size_t i = 0; i < broken.size(); ++i) {
    if (broken[i] >= 0) result[i] = rules.reason(broken[i], static_cast<int>(i));
  }
  return result;
}

std::vector<ValueId> split_weights(const Graph& graph) {
  const graph::AliasAnalysis aliases(graph);
  std::vector<ValueId> result(std::max<size_t>(graph.operators.size(), 1) - 1, kUndefined);
  const std::vector<std::vector<int>> uses = value_uses(graph);
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const graph::Value& value = graph.values[v];
    if (value.kind != ValueKind::kResult || value.alias_set < 0 || uses[v].empty()) continue;
    const ValueId parameter = aliases.set(value.alias_set).base;
    if (parameter == kUndefined || graph.values[parameter].kind != ValueKind::kParameter) continue;
    for (int i = value.producer; i < uses[v].back(); ++i) result[i] = parameter;
  }
  return result;
}

}  // namespace smp::partitioner
