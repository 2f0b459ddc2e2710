// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/batch_axis.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>

#include "core/check.h"
#include "graph/differentiate.h"
#include "graph/leaf.h"
#include "graph/visit.h"
#include "nn/rewrite/legality.h"

namespace smp::nn::rewrite {
namespace {

using graph::BatchAxes;
using graph::BatchRole;
using graph::Graph;
using graph::kNoAxis;
using graph::kUndefined;
using graph::Operator;
using graph::TensorMeta;
using graph::Value;
using graph::ValueId;
using graph::ValueKind;

std::string describe(const Graph& graph, size_t index) {
  const Operator& op = graph.operators[index];
  return c10::str("operator ", index, " (", op.name(),
                  op.scope.empty() ? "" : ", in module \"" + op.scope + "\"", ")");
}

/// Where two captures of one function part; nothing: they have the same operators on the same
/// values.
std::optional<std::string> first_difference(const Graph& one, const Graph& many) {
  const size_t both = std::min(one.operators.size(), many.operators.size());
  for (size_t i = 0; i < both; ++i) {
    const Operator& a = one.operators[i];
    const Operator& b = many.operators[i];
    if (!(a.handle == b.handle)) {
      return c10::str(describe(one, i), " is ", b.name(), " there");
    }
    if (!graph::same_arguments(a, b) || a.results != b.results || !(a.mode == b.mode)) {
      return c10::str(describe(one, i), " works on other tensors there");
    }
  }
  if (one.operators.size() != many.operators.size()) {
    return c10::str("there are ", many.operators.size(), " operators instead of ",
                    one.operators.size());
  }
  const bool same_ends =
      one.inputs == many.inputs && one.outputs == many.outputs && one.roots == many.roots;
  if (same_ends) return std::nullopt;
  return "it returns or differentiates other tensors";
}

/// True if the values are alike, with their memory where an operator writes some.
bool same_values(const Graph& one, const Graph& many) {
  const bool writes = std::any_of(one.operators.begin(), one.operators.end(),
                                  [](const Operator& op) { return !op.writes.empty(); });
  return std::equal(one.values.begin(), one.values.end(), many.values.begin(), many.values.end(),
                    [&](const Value& a, const Value& b) {
                      return a.kind == b.kind && a.name == b.name && a.producer == b.producer &&
                             a.meta.dtype == b.meta.dtype &&
                             a.meta.requires_grad == b.meta.requires_grad &&
                             (!writes || a.alias_set == b.alias_set);
                    });
}

/// The axis along which a tensor of several microbatches is longer than that of one: the only
/// dimension in which the sizes differ, and by `factor`; else `kNoAxis`.
int axis_between(const TensorMeta& one, const TensorMeta& many, int factor) {
  if (one.sizes.size() != many.sizes.size()) return kNoAxis;
  int axis = kNoAxis;
  for (size_t d = 0; d < one.sizes.size(); ++d) {
    if (one.sizes[d] == many.sizes[d]) continue;
    if (axis != kNoAxis || many.sizes[d] != factor * one.sizes[d]) return kNoAxis;
    axis = static_cast<int>(d);
  }
  return axis;
}

/// Whether the results follow from sizes and numbers alone, every row alike or drawn anew.
bool is_factory(const Call& call) {
  static const std::set<std::string> names = {
      "aten::empty",     "aten::full", "aten::new_empty", "aten::new_full", "aten::new_ones",
      "aten::new_zeros", "aten::ones", "aten::rand",      "aten::randn",    "aten::zeros"};
  return names.count(call.base_name()) > 0;
}

/// Whether constants are sizes of the result: those of several microbatches are used.
bool has_sizes(const Call& call) {
  static const std::set<std::string> names = {
      "aten::_unsafe_view", "aten::expand",    "aten::flatten", "aten::repeat", "aten::reshape",
      "aten::reshape_as",   "aten::unflatten", "aten::view",    "aten::view_as"};
  return names.count(call.base_name()) > 0 || is_factory(call);
}

class Finder {
 public:
  Finder(const Graph& one, const Graph& many, int factor)
      : one_(one),
        many_(many),
        factor_(factor),
        layouts_(layouts_in(one, std::vector<Layout>(one.values.size(), Layout::shared()))),
        partial_(one.values.size()) {
    layouts_.of_microbatches = true;
  }

  BatchAxes run() {
    result_.refusal = why_not_together(one_);
    if (!result_.refusal) compare();
    if (result_.refusal) return std::move(result_);
    do {
      assign_roles();
    } while (add_mixed_sets());
    check_ends();
    return std::move(result_);
  }

 private:
  void compare() {
    if (const auto difference = first_difference(one_, many_)) {
      result_.refusal = c10::str("on ", factor_,
                                 " times the samples the function takes another "
                                 "way: ",
                                 *difference);
    } else if (!same_values(one_, many_)) {
      result_.refusal = c10::str("on ", factor_,
                                 " times the samples its tensors are of other kinds "
                                 "or share memory in another way");
    }
  }

  void assign_roles() {
    result_.role.clear();
    result_.axis.assign(one_.values.size(), kNoAxis);
    std::fill(layouts_.of.begin(), layouts_.of.end(), Layout::shared());
    std::fill(partial_.begin(), partial_.end(), false);
    for (ValueId input : one_.inputs) {
      if (input == kUndefined) continue;
      const TensorMeta& meta = one_.values[input].meta;
      const TensorMeta& of_many = many_.values[input].meta;
      set_axis(input);
      SMP_INTERNAL_ASSERT(is_batched(input) || meta.sizes == of_many.sizes, "input ",
                          one_.values[input].name, " of ", meta.to_string(), " is not cut from ",
                          of_many.to_string());
    }
    for (size_t i = 0; i < one_.operators.size(); ++i) {
      const Call call(one_, i, factor_, layouts_);
      result_.role.push_back(role_of(call));
      for (ValueId value : call.results()) {
        partial_[value] = result_.role[i] == BatchRole::kPart;
        if (result_.role[i] == BatchRole::kWhole) set_axis(value);
      }
    }
  }

  int axis_of(ValueId value) const {
    return axis_between(one_.values[value].meta, many_.values[value].meta, factor_);
  }
  bool is_batched(ValueId value) const { return result_.axis[value] != kNoAxis; }

  void set_axis(ValueId value) {
    result_.axis[value] = axis_of(value);
    if (is_batched(value)) layouts_.of[value] = Layout::divided(result_.axis[value]);
  }

  BatchRole role_of(const Call& call) const {
    const auto& tensors = call.tensors();
    const auto partial = [&](ValueId value) { return partial_[value]; };
    if (std::any_of(tensors.begin(), tensors.end(), partial) || is_on_mixed_set(call.op())) {
      return BatchRole::kPart;
    }
    if (!one_.makes_literal(call.op()) && treats_samples_apart(call)) return BatchRole::kWhole;
    return depends(call) || call.op().random_ordinal >= 0 ? BatchRole::kPart : BatchRole::kShared;
  }

  bool depends(const Call& call) const {
    return std::any_of(call.tensors().begin(), call.tensors().end(),
                       [&](ValueId value) { return is_batched(value); });
  }

  /// Whether the operator does the same on several microbatches as on each: every result on several
  /// is the concatenation, along its axis, of the results on each, and so is every gradient that it
  /// sends back to a batched argument. Random operators draw other numbers.
  bool treats_samples_apart(const Call& call) const {
    const auto& name = call.op().handle.operator_name();
    std::vector<Layout> results;
    for (ValueId value : call.results()) {
      if (axis_of(value) == kNoAxis) return false;
      results.push_back(Layout::divided(axis_of(value)));
    }
    if (results.empty() || name.overload_name.find("out") != std::string::npos ||
        !same_constants(call) || !shares_alike(call)) {
      return false;
    }
    if (is_factory(call)) return true;
    return (depends(call) || (has_sizes(call) && !call.tensors().empty())) &&
           is_legal(call, results);
  }

  /// Tensors that are not batched have the same sizes on one and on several microbatches. (One that
  /// counts the samples, `arange(batch)`, has not.)
  bool shares_alike(const Call& call) const {
    return std::all_of(call.tensors().begin(), call.tensors().end(), [&](ValueId value) {
      return is_batched(value) || one_.values[value].meta.sizes == many_.values[value].meta.sizes;
    });
  }

  /// Nothing but sizes differs between the constants on one and on several microbatches, or numbers
  /// that no shape depends on.
  bool same_constants(const Call& call) const {
    if (has_sizes(call)) return true;
    const auto& own = call.op().arguments;
    const auto& of_many = many_.operators[call.index()].arguments;
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i].kind != graph::Argument::Kind::kConstant) continue;
      if (graph::is_patchable(call.op().handle.schema(), i)) continue;
      if (graph::constant_to_string(own[i].constant) !=
          graph::constant_to_string(of_many[i].constant)) {
        return false;
      }
    }
    return true;
  }

  bool is_on_mixed_set(const Operator& op) const {
    bool found = false;
    const auto look = [&](ValueId value) {
      found = found || mixed_sets_.count(one_.values[value].alias_set) > 0;
    };
    graph::for_each_argument(op, look);
    graph::for_each_result(op, look);
    return found;
  }

  /// Storages that are written, and on which operators of several roles work: all of these become
  /// parts.
  bool add_mixed_sets() {
    std::vector<std::set<BatchRole>> roles(one_.alias_sets);
    for (size_t i = 0; i < one_.operators.size(); ++i) {
      const auto note = [&](ValueId value) {
        const int set = one_.values[value].alias_set;
        if (set >= 0) roles[set].insert(result_.role[i]);
      };
      graph::for_each_argument(one_.operators[i], note);
      graph::for_each_result(one_.operators[i], note);
    }
    const size_t before = mixed_sets_.size();
    for (const Operator& op : one_.operators) {
      for (int set : op.writes) {
        if (set >= 0 && roles[set].size() > 1) mixed_sets_.insert(set);
      }
    }
    return mixed_sets_.size() > before;
  }

  void check_ends() {
    for (const graph::BackwardRoot& root : one_.roots) {
      if (partial_[root.value] || is_batched(root.value)) continue;
      result_.refusal = "what it differentiates does not depend on the batch";
    }
    const bool any = std::count(result_.role.begin(), result_.role.end(), BatchRole::kWhole) > 0;
    if (!any) result_.refusal = "no operator is known to treat the samples independently";
  }

  const Graph& one_;
  const Graph& many_;
  const int factor_;
  BatchAxes result_;
  Layouts layouts_;            // batched values are divided among the microbatches
  std::vector<bool> partial_;  // whether each value exists for each microbatch on its own
  std::set<int> mixed_sets_;
};

}  // namespace

core::Refusal why_not_together(const Graph& graph) {
  std::vector<const Value*> lasting(graph.alias_sets, nullptr);
  for (const Value& value : graph.values) {
    const bool made_inside = value.kind == ValueKind::kResult || value.kind == ValueKind::kLiteral;
    if (!made_inside && value.alias_set >= 0) lasting[value.alias_set] = &value;
  }
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const Operator& op = graph.operators[i];
    if (graph::is_leaf(op.handle)) {
      return describe(graph, i) + " calls a leaf module, whose code is not seen";
    }
    if (op.handle == graph::grad_operator()) {
      return describe(graph, i) + " differentiates the operators of one microbatch";
    }
    for (int set : op.writes) {
      if (set < 0 || lasting[set] == nullptr) continue;
      return c10::str(describe(graph, i), " writes ", graph::to_string(lasting[set]->kind), " \"",
                      lasting[set]->name, "\", which the next microbatch would see");
    }
  }
  return std::nullopt;
}

BatchAxes find_batch_axes(const Graph& one, const Graph& many, int factor) {
  return Finder(one, many, factor).run();
}

}  // namespace smp::nn::rewrite
