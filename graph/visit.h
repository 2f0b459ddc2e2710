// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <optional>

#include "core/check.h"
#include "graph/graph.h"

namespace smp::graph {

/// Calls `visit(ValueId)` for every defined tensor among an operator's arguments.
template <class Visitor>
void for_each_argument(const Operator& op, const Visitor& visit) {
  for (const Argument& argument : op.arguments) {
    for (ValueId value : argument.values) {
      if (value != kUndefined) visit(value);
    }
  }
}

/// Calls `visit(ValueId)` for every defined result of an operator.
template <class Visitor>
void for_each_result(const Operator& op, const Visitor& visit) {
  for (ValueId value : op.results) {
    if (value != kUndefined) visit(value);
  }
}

/// True if two operators have the same values as arguments.
inline bool same_arguments(const Operator& a, const Operator& b) {
  return std::equal(a.arguments.begin(), a.arguments.end(), b.arguments.begin(), b.arguments.end(),
                    [](const Argument& x, const Argument& y) {
                      return x.kind == y.kind && x.values == y.values;
                    });
}

/// Calls `visit(ValueId result, ValueId argument)` for every result of an operator that is the very
/// tensor of an argument.
template <class Visitor>
void for_each_same_tensor(const Operator& op, const Visitor& visit) {
  c10::SmallVector<ValueId, 8> arguments;  // undefined ones count
  for (const Argument& argument : op.arguments) {
    arguments.append(argument.values.begin(), argument.values.end());
  }
  for (size_t r = 0; r < op.results.size(); ++r) {
    const int same = op.result_is_argument[r];
    if (same >= 0 && op.results[r] != kUndefined) visit(op.results[r], arguments[same]);
  }
}

/// True if an operator writes the memory of a value.
inline bool writes_to(const Graph& graph, const Operator& op, ValueId value) {
  return std::find(op.writes.begin(), op.writes.end(), graph.values[value].alias_set) !=
         op.writes.end();
}

/// True if a value lies on the memory of an argument of an operator.
inline bool lies_on_argument(const Graph& graph, const Operator& op, ValueId value) {
  bool found = false;
  for_each_argument(op, [&](ValueId argument) {
    found |= graph.values[argument].alias_set == graph.values[value].alias_set;
  });
  return found;
}

/// True if `test(const Value&)` is for some defined result of an operator.
template <class Test>
bool any_result(const Graph& graph, const Operator& op, const Test& test) {
  return std::any_of(op.results.begin(), op.results.end(), [&](ValueId value) {
    return value != kUndefined && test(graph.values[value]);
  });
}

/// The argument as an operator is called with it. `tensor_of(ValueId)` gives the tensor of a value;
/// it is asked for kUndefined, too.
template <class TensorOf>
c10::IValue to_ivalue(const Argument& argument, const TensorOf& tensor_of) {
  switch (argument.kind) {
    case Argument::Kind::kConstant:
      return argument.constant;
    case Argument::Kind::kTensor:
      return tensor_of(argument.values[0]);
    case Argument::Kind::kTensorList: {
      c10::List<at::Tensor> list;
      list.reserve(argument.values.size());
      for (ValueId id : argument.values) list.push_back(tensor_of(id));
      return list;
    }
    case Argument::Kind::kOptionalTensorList: {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(argument.values.size());
      for (ValueId id : argument.values) {
        const at::Tensor tensor = tensor_of(id);
        list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
      }
      return list;
    }
  }
  SMP_INTERNAL_ASSERT(false, "an argument of another kind");
}

}  // namespace smp::graph
