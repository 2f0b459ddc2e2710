// SPDX-License-Identifier: Apache-2.0
#include "graph/guard.h"

#include <algorithm>
#include <cmath>

#include "graph/content.h"

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

std::string difference_of_inputs(const std::vector<Value>& inputs, const Graph& graph) {
  if (inputs.size() != graph.inputs.size()) {
    return c10::str("there are ", inputs.size(), " input tensors, and were ", graph.inputs.size());
  }
  const auto describe = [](const TensorMeta& meta) {
    return c10::str(meta.dtype, c10::IntArrayRef(meta.sizes), " with strides ",
                    c10::IntArrayRef(meta.strides));
  };
  std::string text;
  for (size_t i = 0; i < inputs.size() && text.empty(); ++i) {
    const TensorMeta &is = inputs[i].meta, &was = graph.values[i].meta;
    if (!(is == was))
      text = c10::str("input ", i, " is ", describe(is), ", and was ", describe(was));
  }
  return text;
}

Guard::Guard(const std::vector<const Graph*>& candidates, const std::vector<Value>& inputs)
    : value_count_(static_cast<ValueId>(inputs.size())) {
  for (const Graph* candidate : candidates) {
    if (difference_of_inputs(inputs, *candidate).empty()) live_.push_back({candidate, {}, {}, {}});
  }
}

const Value& Guard::value(ValueId id) const {
  return id < value_count_ ? graph().values[id] : added_[id - value_count_];
}

ValueId Guard::add(Value value) {
  added_.push_back(std::move(value));
  return value_count_ + static_cast<ValueId>(added_.size()) - 1;
}

std::vector<std::pair<ValueId, at::Tensor>> Guard::added_constants() const {
  std::vector<std::pair<ValueId, at::Tensor>> constants;
  for (size_t i = 0; i < added_.size(); ++i) {
    if (!added_[i].content.defined()) continue;
    constants.emplace_back(value_count_ + static_cast<ValueId>(i), added_[i].content);
  }
  return constants;
}

bool Guard::expects(const c10::OperatorHandle& op) const {
  const auto& operators = graph().operators;
  return next_operator_ < operators.size() && operators[next_operator_].handle == op;
}

std::optional<std::string> Guard::compare(const TracedCall& call, const HostData& host_data) {
  for (auto live = live_.begin(); live != live_.end();) {
    const auto difference = differs(*live, call, host_data);
    if (!difference) {
      ++live;
    } else if (live_.size() > 1) {
      live = live_.erase(live);
    } else {
      return difference;
    }
  }
  return std::nullopt;
}

/// The first way in which the call is not the candidate's next operator; notes permitted
/// differences.
std::optional<std::string> Guard::differs(Live& live, const TracedCall& call,
                                          const HostData& host_data) const {
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
  if (!(op.mode == call.mode))
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
  if (const Value* other = other_added(graph)) {
    return describe(c10::str("reads ", graph::to_string(other->kind), " ", other->name, " : ",
                             other->meta.to_string()));
  }
  if (const auto filled = host_data.filled_unlike(graph, op, call, *this)) {
    return describe(c10::str("uses %", *filled, ", which host code has filled"));
  }
  live.constants.insert(live.constants.end(), constants.begin(), constants.end());
  note_contents(live);
  return std::nullopt;
}

/// The first of the added values that is another one in the graph, or nullptr.
const Value* Guard::other_added(const Graph& graph) const {
  for (size_t i = 0; i < added_.size(); ++i) {
    const Value& expected = graph.values[value_count_ + i];
    const Value& got = added_[i];
    const bool same = expected.kind == got.kind && expected.name == got.name &&
                      expected.meta == got.meta &&
                      is_wrapped_number(expected.content) == is_wrapped_number(got.content);
    if (!same) return &got;
  }
  return nullptr;
}

void Guard::note_contents(Live& live) const {
  for (const auto& [id, content] : added_constants()) {
    if (same_content(content, live.graph->values[id].content)) continue;
    live.contents.push_back({id, clone_content(content)});
  }
}

const Operator& Guard::advance() {
  added_.clear();
  const Operator& op = graph().operators[next_operator_++];
  // The graph has the added values, and the results.
  value_count_ = op.first_result;
  for (ValueId id : op.results) value_count_ += id != kUndefined;
  return op;
}

bool Guard::requires_grad(ValueId id) {
  auto& recorded = live_[0].requires_grad;
  if (!recorded) recorded.emplace(graph());
  return recorded->since(id) < static_cast<int>(next_operator_);
}

void Guard::settle(const HostMemory& memory, bool /*for_read*/) {
  bool differs = false;
  for (const Live& live : live_) {
    const Value& known = live.graph->values[memory.id];
    differs |= known.kind == ValueKind::kLiteral && !same_content(known.content, memory.tensor);
  }
  literals_[memory.id] = differs ? clone_content(memory.tensor) : at::Tensor();
}

bool Guard::leave_unless_literal(ValueId id) {
  const auto others = std::partition(live_.begin(), live_.end(), [&](const Live& live) {
    return live.graph->values[id].kind == ValueKind::kLiteral;
  });
  if (others == live_.begin()) return false;
  live_.erase(others, live_.end());
  return true;
}

bool Guard::ends_like(const Graph& graph, const std::vector<ValueId>& outputs,
                      const std::vector<BackwardRoot>& roots) const {
  return graph.operators.size() == next_operator_ && graph.outputs == outputs &&
         graph.roots == roots && graph.values.size() == value_count_ + added_.size() &&
         other_added(graph) == nullptr;
}

std::optional<TraceResult> Guard::match(const std::vector<ValueId>& outputs,
                                        const std::vector<BackwardRoot>& roots) {
  for (Live& live : live_) {
    if (!ends_like(*live.graph, outputs, roots)) continue;
    note_contents(live);
    for (const auto& [id, content] : literals_) {
      const Value& known = live.graph->values[id];
      if (known.kind != ValueKind::kLiteral || !content.defined()) continue;
      if (!same_content(content, known.content)) live.contents.push_back({id, content});
    }
    TraceResult result;
    result.match = live.graph;
    result.constants = std::move(live.constants);
    result.contents = std::move(live.contents);
    return result;
  }
  return std::nullopt;
}

Graph Guard::prefix() const {
  const Live& last = live_[0];
  const Graph& from = *last.graph;
  Graph prefix;
  prefix.values.assign(from.values.begin(), from.values.begin() + value_count_);
  prefix.operators.assign(from.operators.begin(), from.operators.begin() + next_operator_);
  prefix.alias_sets = from.alias_sets;
  for (const ConstantOverride& change : last.constants) {
    prefix.operators[change.operator_index].arguments[change.argument].constant = change.value;
  }
  for (const ContentOverride& change : last.contents) {
    prefix.values[change.value].content = change.content;
  }
  take_literals(prefix);
  for (Value value : added_) {
    value.alias_set = prefix.alias_sets++;
    if (value.content.defined()) value.content = clone_content(value.content);
    prefix.values.push_back(std::move(value));
  }
  return prefix;
}

/// A factory's result that the run has not used yet is no literal: whether host code fills it in
/// this run shows later.
void Guard::take_literals(Graph& prefix) const {
  for (size_t id = 0; id < prefix.values.size(); ++id) {
    Value& value = prefix.values[id];
    if (value.kind != ValueKind::kLiteral) continue;
    const auto used = literals_.find(static_cast<ValueId>(id));
    if (used == literals_.end()) {
      value.kind = ValueKind::kResult;
      value.content = at::Tensor();
    } else if (used->second.defined()) {
      value.content = used->second;
    }
  }
}

}  // namespace smp::graph
