// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/build.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "core/check.h"
#include "graph/leaf.h"
#include "graph/visit.h"
#include "nn/rewrite/graph_writer.h"
#include "nn/rewrite/legality.h"

namespace smp::nn::rewrite {
namespace {

using graph::Argument;
using graph::BackwardRoot;
using graph::kUndefined;
using graph::Operator;
using graph::TensorMeta;
using graph::Value;
using graph::ValueId;

/// The dimensions with more than one element, by the memory between two neighbours: the order in
/// which a tensor made like this one is filled.
std::vector<int64_t> memory_order(const TensorMeta& meta) {
  std::vector<int64_t> order;
  for (size_t d = 0; d < meta.sizes.size(); ++d) {
    if (meta.sizes[d] != 1) order.push_back(static_cast<int64_t>(d));
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return meta.strides[a] > meta.strides[b]; });
  return order;
}

class Builder final : public GraphWriter {
 public:
  Builder(const Propagation& propagation, const Outcome& outcome, const DivideOptions& options)
      : GraphWriter(propagation, options),
        outcome_(outcome),
        ids_(whole_.values.size(), kUndefined),
        conversions_(whole_.values.size()) {
    result_.map.operators.resize(whole_.operators.size());
  }

  DividedGraph run() {
    add_givens();
    for (size_t i = 0; i < whole_.operators.size(); ++i) add_call(i);
    add_ends();
    place_the_rest();
    for (ValueId id : ids_) {
      result_.map.values.emplace_back();
      if (id != kUndefined) result_.map.values.back().push_back(id);
    }
    return std::move(result_);
  }

  // Interface for rules that write operators.

  ValueId argument(int position) override {
    const Call& call = *call_;
    const ValueId id = converted(call.tensors()[position], treatment_->arguments[position],
                                 {call.requires_grad(position), call.has_gradient(position)});
    if (call.requires_grad(position)) requires_grad_.insert(id);
    recorded_sets_[graph().values[id].alias_set] =
        whole_.values[call.tensors()[position]].alias_set;
    return id;
  }

 private:
  void add_givens() {
    std::map<int, int> set_of;
    for (size_t v = 0; v < whole_.values.size(); ++v) {
      const Value& value = whole_.values[v];
      if (value.producer >= 0) continue;
      const Layout& layout = outcome_.layouts[v];
      TensorMeta meta = value.meta;
      if (layout.is_divided()) {
        meta = contiguous(meta, local_sizes(meta.sizes, layout, options_.ranks));
      }
      const auto [set, is_new] = set_of.try_emplace(value.alias_set, graph().alias_sets);
      if (is_new) ++graph().alias_sets;
      ids_[v] = add_value(value, meta, -1, set->second);
      place(ids_[v], layout);
      conversions_.add(static_cast<ValueId>(v), layout, ids_[v]);
    }
    for (ValueId input : whole_.inputs) {
      graph().inputs.push_back(input == kUndefined ? kUndefined : ids_[input]);
    }
  }

  /// Adds the operators that stand for one of the whole graph.
  void add_call(size_t index) {
    const Call& call = propagation_.calls()[index];
    call_ = &call;
    treatment_ = outcome_.treatments[index].get();
    recorded_sets_.clear();
    std::vector<ValueId> results;
    if (treatment_->emit != nullptr) {
      results = treatment_->emit(*this, call, *treatment_);
      keep_apart(call, results);
    } else {
      results = add_same(call);
    }
    share_cost(call);
    adopt_results(call, results);
    for (int set : call.op().writes) forget(set);
  }

  /// Random numbers are drawn in the order of memory, which joining and summing may have changed:
  /// the value in the order that was recorded.
  ValueId in_memory_order(ValueId value, const TensorMeta& recorded) {
    std::vector<int64_t> order = memory_order(recorded);
    if (order == memory_order(meta(value))) return value;
    for (size_t d = 0; d < recorded.sizes.size(); ++d) {
      if (recorded.sizes[d] == 1) order.push_back(static_cast<int64_t>(d));
    }
    std::vector<int64_t> back(order.size());
    for (size_t i = 0; i < order.size(); ++i) back[order[i]] = static_cast<int64_t>(i);
    const ValueId sorted = call("aten::permute", "", {value}, {std::move(order)});
    const ValueId dense = call("aten::contiguous", "", {sorted}, {at::MemoryFormat::Contiguous});
    return call("aten::permute", "", {dense}, {std::move(back)});
  }

  /// A whole random operator, if it must be given tensors in another order of memory; else nothing.
  std::optional<std::vector<ValueId>> add_reordered(const Call& call) {
    const bool is_plain = call.op().random_ordinal >= 0 && !graph::is_leaf(call.op().handle) &&
                          call.results().size() == 1;
    if (!is_plain || call.tensors().empty()) return std::nullopt;
    const ValueId first = argument(0);
    const TensorMeta& recorded = call.meta(0);
    if (meta(first).sizes != recorded.sizes) return std::nullopt;
    const ValueId ordered = in_memory_order(first, recorded);
    if (ordered == first) return std::nullopt;
    Operator op = like_call(call.op().handle);
    op.arguments = call.op().arguments;
    int position = 0;
    for (Argument& own : op.arguments) {
      for (ValueId& value : own.values) {
        if (value == kUndefined) continue;
        value = position == 0 ? ordered : argument(position);
        ++position;
      }
    }
    note_writes(op);
    const ValueId made = add_on_shapes(std::move(op)).at(0);
    follow_all(call);
    if (!call.in_place()) return std::vector<ValueId>{made};
    return std::vector<ValueId>{this->call("aten::copy_", "", {first, made}, {false})};
  }

  /// The numbers of the call that may change are those of the operator added last.
  void follow_all(const Call& call) {
    const auto& schema = call.op().handle.schema();
    for (size_t a = 0; a < call.op().arguments.size(); ++a) {
      if (call.op().arguments[a].kind != Argument::Kind::kConstant) continue;
      if (graph::is_patchable(schema, a)) {
        follow(schema.arguments()[a].name().c_str(), static_cast<int>(a), nullptr);
      }
    }
  }

  /// The same operator, on each rank's tensors.
  std::vector<ValueId> add_same(const Call& call) {
    if (auto results = add_reordered(call)) return std::move(*results);
    Operator op = call.op();
    bool same_shapes = treatment_->constants.empty();
    int position = 0;
    for (Argument& argument : op.arguments) {
      for (ValueId& value : argument.values) {
        if (value == kUndefined) continue;
        const TensorMeta& before = whole_.values[value].meta;
        value = this->argument(position++);
        same_shapes &= meta(value) == before;
      }
    }
    for (const auto& [argument, constant] : treatment_->constants) {
      op.arguments[argument].constant = constant;
    }
    const auto& same = call.op();
    const std::map<int, int> sets = argument_sets(same, op);
    for (int& set : op.writes) set = sets.at(set);
    const bool copied = same_shapes || graph::is_leaf(same.handle) || whole_.makes_literal(same);
    auto results =
        copied ? add_as_recorded(std::move(op), call, sets) : add_on_shapes(std::move(op));
    follow_all(call);
    if (!copied) keep_apart(call, results);
    return results;
  }

  /// Where the recorded operator copied and this one does not have to (a reshape of a tensor that
  /// is contiguous here), a write must not reach both. Nor may it reach one only where the recorded
  /// results were views.
  void keep_apart(const Call& call, std::vector<ValueId>& results) {
    place_results(call, results);
    std::set<int> recorded;
    for (ValueId value : call.tensors()) recorded.insert(whole_.values[value].alias_set);
    for (size_t r = 0; r < results.size(); ++r) {
      const ValueId result = call.op().results[r];
      if (result == kUndefined || results[r] == kUndefined) continue;
      const int set = whole_.values[result].alias_set;
      const auto lies_on = recorded_sets_.find(graph().values[results[r]].alias_set);
      const bool shares = lies_on != recorded_sets_.end();
      const bool shared = recorded.count(set) > 0;
      if (shares == shared) continue;
      SMP_INTERNAL_ASSERT(shares || !propagation_.is_written_after(set, call.index()),
                          "what stands for ", call.op().name(),
                          " copies a tensor that is written later");
      if (!shares || !(propagation_.is_written_after(set, call.index()) ||
                       propagation_.is_written_after(lies_on->second, call.index()))) {
        continue;
      }
      results[r] = this->call("aten::clone", "", {results[r]}, {c10::IValue()});
    }
  }

  /// The alias sets of an operator's arguments: as in the whole graph -> as here.
  std::map<int, int> argument_sets(const Operator& recorded, const Operator& own) const {
    std::map<int, int> sets;
    for (size_t a = 0; a < recorded.arguments.size(); ++a) {
      for (size_t i = 0; i < recorded.arguments[a].values.size(); ++i) {
        const ValueId value = recorded.arguments[a].values[i];
        if (value == kUndefined) continue;
        const ValueId here = own.arguments[a].values[i];
        sets.try_emplace(whole_.values[value].alias_set, result_.graph.values[here].alias_set);
      }
    }
    return sets;
  }

  /// Results are as they were recorded: all arguments are, too.
  std::vector<ValueId> add_as_recorded(Operator op, const Call& call, std::map<int, int> sets) {
    std::vector<ShapeResult> results;
    std::vector<int> own_sets;
    for (ValueId result : call.op().results) {
      ShapeResult shape;
      shape.defined = result != kUndefined;
      if (shape.defined) {
        shape.meta = whole_.values[result].meta;
        const int recorded = whole_.values[result].alias_set;
        const auto [set, is_new] = sets.try_emplace(recorded, graph().alias_sets);
        if (is_new) ++graph().alias_sets;
        own_sets.push_back(set->second);
      } else {
        own_sets.push_back(-1);
      }
      results.push_back(std::move(shape));
    }
    op.result_is_argument = call.op().result_is_argument;
    return append(std::move(op), results, own_sets);
  }

  /// A value in a layout, which is made where it is first asked for.
  ValueId converted(ValueId value, const Layout& layout, Gradient gradient) {
    return conversions_.get(
        value, layout, gradient.sent,
        [&](const Conversion& step, ValueId from) { return convert(value, step, from, gradient); });
  }

  /// The operators that stand for a call share its cost, divided if they work on parts.
  void share_cost(const Call& call) {
    std::vector<int> sharing;
    for (int index : result_.map.operators[call.index()]) {
      const std::string& name = graph().operators[index].handle.operator_name().name;
      if (name != "smp::tp_reduce" && name != "smp::tp_reduce_scatter") sharing.push_back(index);
    }
    const double share = 1.0 / ((works_on_parts(*treatment_) ? options_.ranks : 1) *
                                std::max<double>(1, static_cast<double>(sharing.size())));
    for (int index : sharing) {
      Operator& op = graph().operators[index];
      const graph::Cost& cost = call.op().cost;
      op.cost.forward_us = cost.forward_us * share;
      op.cost.backward_us = cost.backward_us * share;
      op.cost.output_bytes = static_cast<int64_t>(static_cast<double>(cost.output_bytes) * share);
      op.cost.saved_bytes = static_cast<int64_t>(static_cast<double>(cost.saved_bytes) * share);
    }
    if (treatment_->reduced_bytes > 0 || treatment_->gathered >= 0) count_inside();
  }

  /// Losses and linear layers that gather their input move it themselves.
  void count_inside() {
    const int last = result_.map.operators[call_->index()].back();
    Operator& op = graph().operators[last];
    const std::string& name = op.handle.operator_name().name;
    if (name != "smp::tp_cross_entropy" && name != "smp::tp_gathered_linear") return;
    const Traffic moved = traffic_inside(*call_, *treatment_);
    const auto [forward, backward] = times_of(moved, options_);
    op.cost.forward_us += forward;
    op.cost.backward_us += backward;
    count(op.scope, moved);
  }

  void place_results(const Call& call, const std::vector<ValueId>& results) {
    size_t defined = 0;
    for (size_t r = 0; r < results.size(); ++r) {
      if (call.op().results[r] == kUndefined) continue;
      if (results[r] != kUndefined) place(results[r], treatment_->results[defined]);
      ++defined;
    }
  }

  /// The results of the whole graph's operator are those of its last ones here.
  void adopt_results(const Call& call, const std::vector<ValueId>& results) {
    place_results(call, results);
    const bool communicates = is_collective(call.op());
    size_t defined = 0;
    for (size_t r = 0; r < call.op().results.size(); ++r) {
      const ValueId result = call.op().results[r];
      if (result == kUndefined) continue;
      const Layout& layout = treatment_->results[defined++];
      const Value& whole = whole_.values[result];
      const ValueId own = results.at(r);
      const Sizes expected = local_sizes(whole.meta.sizes, layout, options_.ranks);
      SMP_CHECK_WITH(UsageError, own != kUndefined && meta(own).sizes == expected,
                     "the rule of operator ", call.op().name(), " says that its result is ",
                     layout.to_string(), ", of sizes ", c10::IntArrayRef(expected),
                     " on each rank, but on what it asks for the operator makes ",
                     own == kUndefined ? "nothing" : meta(own).to_string(),
                     ". Correct the rule (smp::tp_register)");
      Value& value = graph().values[own];
      SMP_INTERNAL_ASSERT(value.meta.dtype == whole.meta.dtype, "what stands for ",
                          call.op().name(), " makes ", value.meta.to_string(), " instead of ",
                          whole.meta.to_string());
      if (value.producer >= 0 && treatment_->emit == nullptr) {
        value.kind = whole.kind;
        value.name = whole.name;
        value.content = whole.content;
      }
      value.meta.requires_grad = whole.meta.requires_grad;
      ids_[result] = own;
      if (communicates) result_.made_by_modules.insert(own);
      conversions_.add(result, layout, own);
      if (outcome_.layouts[result] != layout) bring_home(result, layout);
    }
  }

  /// A result whose layout was chosen otherwise than its operator makes it.
  void bring_home(ValueId result, const Layout& made) {
    const Layout& home = outcome_.layouts[result];
    const bool required = whole_.values[result].meta.requires_grad;
    const bool sent = required && whole_.trains() && call_->op().mode.grad;
    converted(result, home, {required, sent});
    if (!made.is_whole()) conversions_.forget(result, home);
  }

  void forget(int set) {
    for (size_t v = 0; v < whole_.values.size(); ++v) {
      if (whole_.values[v].alias_set != set || ids_[v] == kUndefined) continue;
      conversions_.forget(static_cast<ValueId>(v), outcome_.layouts[v]);
    }
  }

  void add_ends() {
    call_ = nullptr;
    const auto whole = [&](ValueId value) {
      if (value == kUndefined) return kUndefined;
      const bool required = propagation_.requires_grad_at_end(value);
      return converted(value, Layout::whole(), {required, required && whole_.trains()});
    };
    for (ValueId output : whole_.outputs) graph().outputs.push_back(whole(output));
    for (const BackwardRoot& root : whole_.roots) {
      BackwardRoot own = root;
      own.value = whole(root.value);
      own.gradient = whole(root.gradient);
      graph().roots.push_back(own);
    }
  }

  const Outcome& outcome_;
  std::vector<ValueId> ids_;  // values of the whole graph, as their operators make them
  Conversions<ValueId> conversions_;
  std::map<int, int> recorded_sets_;  // the arguments' alias set here -> recorded
};

}  // namespace

DividedGraph build(const Propagation& propagation, const Outcome& outcome,
                   const DivideOptions& options) {
  return Builder(propagation, outcome, options).run();
}

}  // namespace smp::nn::rewrite
