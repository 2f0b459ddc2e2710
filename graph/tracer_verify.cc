// The part of Tracer that compares a run with graphs recorded before.

#include <algorithm>
#include <cmath>

#include "graph/alias_analysis.h"
#include "graph/content.h"
#include "graph/leaf.h"
#include "graph/mode_scope.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"
#include "graph/stack_tensors.h"
#include "graph/tracer.h"

namespace smp::graph {
namespace {

bool same_constant(const c10::IValue& a, const c10::IValue& b) {
  if (a.isDouble() && b.isDouble()) {
    return a.toDouble() == b.toDouble() || (std::isnan(a.toDouble()) && std::isnan(b.toDouble()));
  }
  if (a.isInt() && b.isInt()) return a.toInt() == b.toInt();
  if (a.isBool() && b.isBool()) return a.toBool() == b.toBool();
  if (a.isNone() || b.isNone()) return a.isNone() && b.isNone();
  // A leaf's call is another one at each run: it has the arguments of that run.
  if (a.isCapsule()) return false;
  return a == b;  // false for other types, such as an int where a double was
}

/// Some random operators take another way where nothing is left to chance: dropout of 0 returns its
/// argument, and attention without it lays out its result differently.
bool takes_another_way(const Operator& op, const c10::IValue& a, const c10::IValue& b) {
  const auto is_zero = [](const c10::IValue& value) {
    return value.isScalar() && value.toScalar().equal(0);
  };
  return op.random_ordinal >= 0 && is_zero(a) != is_zero(b);
}

bool same_kind(const c10::IValue& a, const c10::IValue& b) { return a.tagKind() == b.tagKind(); }

}  // namespace

bool Tracer::is_expected(const c10::OperatorHandle& op) const {
  if (!verifying()) return false;
  const auto& operators = live_[0].graph->operators;
  return next_operator_ < operators.size() && operators[next_operator_].handle == op;
}

bool Tracer::verify(Call& call, torch::jit::Stack& stack) {
  const ExecutionMode now = mode();
  for (auto live = live_.begin(); live != live_.end();) {
    const auto difference = differs(*live, call, now);
    if (!difference) {
      ++live;
    } else if (live_.size() > 1) {
      live = live_.erase(live);
    } else {
      leave_candidates(*difference);
      return false;
    }
  }
  std::vector<std::pair<ValueId, at::Tensor>> constants;
  for (size_t i = 0; i < pending_.size(); ++i) {
    if (!pending_[i].content.defined()) continue;
    constants.emplace_back(value_count_ + static_cast<ValueId>(i), pending_[i].content);
  }
  pending_.clear();
  const Graph& graph = *live_[0].graph;
  const Operator& op = graph.operators[next_operator_];
  // The graph has what was pending, and the results.
  value_count_ = op.first_result;
  for (ValueId id : op.results) value_count_ += id != kUndefined;
  settle_written(op);
  settle_read(call, op);
  for (const auto& [id, tensor] : constants) {
    note_constant(id, graph.values[id].alias_set, tensor);
  }
  push_recorded_results(call, stack);
  spread_history(op, static_cast<int>(next_operator_));
  ++next_operator_;
  return true;
}

/// The first way in which the call is not the candidate's next operator; notes what may differ.
std::optional<std::string> Tracer::differs(Live& live, const Call& call,
                                           const ExecutionMode& mode) const {
  const Graph& graph = *live.graph;
  const auto describe = [&](const std::string& what) {
    const std::string recorded = next_operator_ < graph.operators.size()
                                     ? graph.line(next_operator_)
                                     : "the end of the function";
    return c10::str("operator ", next_operator_, " (", call.op->schema().name(), ") ", what,
                    "; recorded was ", recorded);
  };
  if (next_operator_ >= graph.operators.size()) return describe("comes after the recorded end");
  const Operator& op = graph.operators[next_operator_];
  if (!(op.handle == *call.op)) {
    return describe("is another one");
  }
  if (!(op.mode == mode))
    return describe("runs in another mode (grad, autocast, smp::partition, after backward)");
  std::vector<ConstantOverride> constants;
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const Argument& expected = op.arguments[i];
    const Argument& got = call.arguments[i];
    if (expected.kind != got.kind || expected.values != got.values) {
      return describe("has other tensors as argument \"" + call.op->schema().arguments()[i].name() +
                      "\"");
    }
    if (expected.kind != Argument::Kind::kConstant ||
        same_constant(expected.constant, got.constant)) {
      continue;
    }
    if (!same_kind(expected.constant, got.constant) || !is_patchable(call.op->schema(), i) ||
        takes_another_way(op, expected.constant, got.constant)) {
      return describe("has another constant as argument \"" +
                      call.op->schema().arguments()[i].name() + "\"");
    }
    constants.push_back({static_cast<int>(next_operator_), static_cast<int>(i), got.constant});
  }
  std::vector<ContentOverride> contents;
  for (size_t i = 0; i < pending_.size(); ++i) {
    const ValueId id = value_count_ + static_cast<ValueId>(i);
    const Value& expected = graph.values[id];
    const Value& got = pending_[i];
    if (expected.kind != got.kind || expected.name != got.name || !(expected.meta == got.meta)) {
      return describe(c10::str("reads ", graph::to_string(got.kind), " ", got.name, " : ",
                               got.meta.to_string()));
    }
    if (got.content.defined() && !same_content(got.content, expected.content)) {
      contents.push_back({id, clone_content(got.content)});
    }
  }
  if (const auto filled = filled_by_host(graph, call, op)) {
    return describe(c10::str("uses %", *filled, ", which host code has filled"));
  }
  live.constants.insert(live.constants.end(), constants.begin(), constants.end());
  live.contents.insert(live.contents.end(), contents.begin(), contents.end());
  return std::nullopt;
}

/// A factory's result that the operator is the first to use, and that host code has filled before,
/// unlike when the graph was recorded.
std::optional<ValueId> Tracer::filled_by_host(const Graph& graph, const Call& call,
                                              const Operator& op) const {
  if (host_data_.empty()) return std::nullopt;
  const auto find = [&](int alias_set, bool for_read) -> std::optional<ValueId> {
    const auto it = host_data_.find(alias_set);
    if (it == host_data_.end()) return std::nullopt;
    const ValueId id = it->second.id;
    const bool known = graph.values[id].kind == ValueKind::kLiteral;
    return known || !it->second.filled(for_read) ? std::nullopt : std::optional(id);
  };
  for (int alias_set : op.writes) {
    if (const auto filled = find(alias_set, false)) return filled;
  }
  for (ValueId id : call.ids) {
    if (id == kUndefined || has_result_on(graph, op, value(id).alias_set)) continue;
    if (const auto filled = find(value(id).alias_set, true)) return filled;
  }
  return std::nullopt;
}

/// The same for a tensor that the function returns or gives as a gradient.
void Tracer::settle_end(ValueId id) {
  if (id == kUndefined) return;
  const auto it = host_data_.find(value(id).alias_set);
  if (it == host_data_.end()) return;
  if (verifying() && it->second.filled(true)) {
    const ValueId filled = it->second.id;
    const auto other = std::partition(live_.begin(), live_.end(), [&](const Live& live) {
      return live.graph->values[filled].kind == ValueKind::kLiteral;
    });
    if (other == live_.begin()) {
      leave_candidates(c10::str("host code has filled %", filled));
    } else {
      live_.erase(other, live_.end());
    }
  }
  settle_read(id);
}

void Tracer::push_recorded_results(const Call& call, torch::jit::Stack& stack) {
  const Graph& graph = *live_[0].graph;
  const Operator& op = graph.operators[next_operator_];
  const auto& schema = call.op->schema();
  const bool factory = call.tensors.empty() && host_may_write(*call.op);
  if (factory && (graph.makes_literal(op) || is_small_on_cpu(graph.values[op.results[0]].meta))) {
    // Host code may be about to write into it, even if no operator reads it then.
    call.op->callBoxed(stack);
    const at::Tensor& result = stack.back().toTensor();
    note_factory(op.results[0], graph.values[op.results[0]].alias_set, result,
                 has_trait(schema.name(), OperatorTrait::kLeavesUninitialised));
    bind(result, op.results[0]);
    return;
  }
  if (is_leaf(*call.op)) {
    leaf_call(call.arguments[0].constant)->keep_result_of(*leaf_call(op.arguments[0].constant));
  }
  torch::jit::drop(stack, schema.arguments().size());
  size_t next = 0;
  const auto take = [&]() -> at::Tensor {
    const ValueId id = op.results[next];
    const int argument = op.result_is_argument[next++];
    if (id == kUndefined) return at::Tensor();
    const TensorMeta& meta = graph.values[id].meta;
    at::Tensor tensor =
        argument >= 0 ? call.tensors[argument] : make_placeholder(meta, options_.step_name);
    if (argument >= 0) follow(tensor, meta);
    bind(tensor, id);
    return tensor;
  };
  for (const int length : op.list_lengths) {
    if (length >= 0) {
      c10::List<at::Tensor> list;
      for (int k = 0; k < length; ++k) list.push_back(take());
      stack.push_back(std::move(list));
    } else {
      stack.push_back(take());
    }
  }
}

/// Goes on as a recording: what was verified so far becomes the beginning of a new graph.
void Tracer::leave_candidates(const std::string& difference) {
  difference_ = difference;
  const Live& last = live_[0];
  const Graph& from = *last.graph;
  graph_ = std::make_unique<Graph>();
  graph_->values.assign(from.values.begin(), from.values.begin() + value_count_);
  graph_->operators.assign(from.operators.begin(), from.operators.begin() + next_operator_);
  graph_->alias_sets = from.alias_sets;
  for (const ConstantOverride& change : last.constants) {
    graph_->operators[change.operator_index].arguments[change.argument].constant = change.value;
  }
  for (const ContentOverride& change : last.contents) {
    graph_->values[change.value].content = change.content;
  }
  for (const Operator& op : graph_->operators) random_count_ += op.random_ordinal >= 0;
  for (Value& value : pending_) {
    value.alias_set = graph_->alias_sets++;
    if (value.content.defined()) {
      note_constant(static_cast<ValueId>(graph_->values.size()), value.alias_set, value.content);
      value.content = clone_content(value.content);
    }
    graph_->values.push_back(std::move(value));
  }
  pending_.clear();
  live_.clear();
  for (const auto& [id, content] : literals_) {
    Value& value = graph_->values[id];
    if (value.kind == ValueKind::kLiteral) value.content = content;
  }
  for (const auto& [alias_set, data] : host_data_) {
    Value& value = graph_->values[data.id];
    if (data.is_read || value.kind != ValueKind::kLiteral) continue;
    value.kind = ValueKind::kResult;  // whether it is filled in this run shows later
    value.content = at::Tensor();
  }
  for (size_t id = 0; id < graph_->values.size(); ++id) {
    first_aliases_.emplace(graph_->values[id].alias_set, static_cast<ValueId>(id));
  }
  restore_views();
  for (auto& [storage, info] : storages_) info.alias_set = graph_->values[info.id].alias_set;
}

/// Makes what stands for the values verified so far views of each other again, where the program's
/// are: a write through one is seen by the others, and so is its gradient.
void Tracer::restore_views() {
  concrete_.resize(graph_->values.size());
  for (const Operator& op : graph_->operators) {
    if (is_leaf(op.handle) || !has_result_on_argument(*graph_, op)) continue;
    Call call;
    call.op = &op.handle;
    call.arguments = op.arguments;
    for (const Argument& argument : op.arguments) {
      call.ids.insert(call.ids.end(), argument.values.begin(), argument.values.end());
    }
    call.tensors.resize(call.ids.size());
    const ModeScope mode(op.mode);
    torch::jit::Stack stack;
    stack.resize(call.arguments.size());
    run_operator(call, op, stack);
    const std::vector<at::Tensor> results = tensors_in(stack, stack.size());
    for (size_t r = 0; r < results.size(); ++r) {
      if (op.results[r] != kUndefined) concrete_[op.results[r]].tensor = results[r];
    }
  }
}

}  // namespace smp::graph
