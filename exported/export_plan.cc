// SPDX-License-Identifier: Apache-2.0
#include "exported/export_plan.h"

#include <algorithm>
#include <limits>
#include <set>

#include "core/check.h"
#include "graph/alias_analysis.h"
#include "graph/content.h"
#include "graph/differentiate.h"
#include "graph/leaf.h"
#include "graph/not_equal.h"
#include "graph/operator_traits.h"
#include "graph/visit.h"

namespace smp::exported {
namespace {

using graph::Graph;
using graph::kUndefined;
using graph::Operator;
using graph::ValueId;
using graph::ValueKind;

constexpr size_t kReturned = std::numeric_limits<size_t>::max();

bool is_of_aten(const Operator& op) {
  return op.handle.operator_name().name.rfind("aten::", 0) == 0;
}

/// Whether the type of a result follows from the default type of floating point numbers, which
/// Python has as float: `integers / 2` in a program whose default is double.
bool follows_default_type(const Graph& graph, const Operator& op) {
  const auto& schema = op.handle.schema();
  if (op.mode.default_dtype == at::kFloat || !graph::has_tensor_argument(schema)) return false;
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const bool is_dtype = schema.arguments()[i].name() == "dtype";
    if (is_dtype && !op.arguments[i].constant.isNone()) return false;
  }
  bool from_integers = true;
  graph::for_each_argument(op, [&](ValueId value) {
    const at::ScalarType dtype = graph.values[value].meta.dtype;
    from_integers &= !at::isFloatingType(dtype) && !at::isComplexType(dtype);
  });
  return from_integers && graph::any_result(graph, op, [&](const graph::Value& value) {
           return value.meta.dtype == op.mode.default_dtype;
         });
}

/// Whether Python takes a number where the operator takes a tensor.
bool takes_numbers(const Operator& op) {
  static const std::set<std::string> names = {"add", "div",      "divide",   "floor_divide", "mul",
                                              "sub", "multiply", "subtract", "true_divide"};
  std::string name = short_name(op);
  if (name.back() == '_') name.pop_back();  // in place
  return names.count(name) > 0;
}

/// Numbers that libtorch wrapped into tensors are written as numbers: tensors would decide types.
void check_numbers(const std::string& file, const Graph& graph, const Operator& op) {
  for (const graph::Argument& argument : op.arguments) {
    for (ValueId value : argument.values) {
      if (value == kUndefined || !graph::is_wrapped_number(graph.values[value].content)) continue;
      const bool is_read =
          argument.kind == graph::Argument::Kind::kTensor && !graph::writes_to(graph, op, value);
      if (is_read && takes_numbers(op)) continue;
      refuse(file, op,
             "takes a number that is wrapped into a tensor and decides no type, which Python has "
             "in sums, differences, products and quotients only",
             "Pass a number, or a tensor (torch::tensor(number))");
    }
  }
}

void check_can_be_written(const std::string& file, const Graph& graph, const Operator& op) {
  if (graph::is_leaf(op.handle)) {
    refuse(file, op,
           "is leaf module \"" + graph::leaf_call(op.arguments[0].constant)->module +
               "\", whose operators are not known",
           "Call the module itself, without smp::leaf, where it can be captured");
  }
  if (op.handle == graph::grad_operator()) {
    refuse(
        file, op, "is torch::autograd::grad, and an exported program has no backward pass in it",
        "Write the derivative with ordinary operators, or export the part of the model before it");
  }
  if (op.name() == "smp::requires_grad") {
    refuse(file, op,
           "changes whether a tensor requires a gradient, which no operator does in Python",
           "Leave requires_grad_() out of what is exported");
  }
  if (!is_of_aten(op)) {
    refuse(
        file, op, "is none of libtorch's, so Python does not have it",
        "Use ordinary operators there. A model that ranks divide is exported by the process that "
        "has it whole");
  }
  if (follows_default_type(graph, op)) {
    refuse(file, op,
           "makes floating point numbers of integers, in the default type, which is " +
               std::string(c10::toString(op.mode.default_dtype)) + " here and float in Python",
           "Convert the integers first: x.to(torch::kDouble)");
  }
  check_numbers(file, graph, op);
  if (op.mode.after_backward > 0 && !op.writes.empty()) {
    refuse(file, op, "writes memory after backward, and an exported program has no backward pass",
           "Write before model->backward, or export model->forward alone");
  }
}

/// Which alias sets a program must find as its operators leave them.
class NeededMemory {
 public:
  explicit NeededMemory(const Graph& graph)
      : graph_(graph), aliases_(graph), sets_(graph.alias_sets, false) {
    for (ValueId output : graph.outputs) note(output);
  }

  bool needs(const Operator& op) const {
    const bool writes = std::any_of(op.writes.begin(), op.writes.end(),
                                    [&](int set) { return sets_[set] || outlives(set); });
    return writes || op.random_ordinal >= 0 ||
           graph::any_result(graph_, op, [&](const graph::Value& value) {
             return value.alias_set >= 0 && sets_[value.alias_set];
           });
  }
  void note(ValueId value) {
    if (value == kUndefined || graph_.values[value].alias_set < 0) return;
    sets_[graph_.values[value].alias_set] = true;
  }

 private:
  bool outlives(int set) const {
    const ValueId base = aliases_.set(set).base;
    if (base == kUndefined) return false;
    const ValueKind kind = graph_.values[base].kind;
    return kind == ValueKind::kBuffer || kind == ValueKind::kInput || kind == ValueKind::kParameter;
  }

  const Graph& graph_;
  const graph::AliasAnalysis aliases_;
  std::vector<bool> sets_;
};

}  // namespace

std::string short_name(const Operator& op) {
  const std::string& name = op.handle.operator_name().name;
  return name.substr(name.rfind(':') + 1);
}

void refuse(const std::string& file, const Operator& op, const std::string& what,
            const std::string& remedy) {
  core::fail<CaptureError>("cannot export \"", file, "\": operator ", op.name(),
                           op.scope.empty() ? "" : ", in module \"" + op.scope + "\",", " ", what,
                           ". ", remedy);
}

ExportPlan::ExportPlan(const Graph& graph, const std::string& file) : graph_(graph) {
  find_needed(graph);
  for (size_t i : operators_) check_can_be_written(file, graph, graph.operators[i]);
  find_uses(graph);
}

void ExportPlan::find_needed(const Graph& graph) {
  NeededMemory memory(graph);
  for (size_t i = graph.operators.size(); i-- > 0;) {
    const Operator& op = graph.operators[i];
    // It states an assumption of the capture, and computes nothing.
    if (op.handle == graph::not_equal_operator() || !memory.needs(op)) continue;
    operators_.push_back(i);
    graph::for_each_argument(op, [&](ValueId value) { memory.note(value); });
  }
  std::reverse(operators_.begin(), operators_.end());
}

void ExportPlan::find_uses(const Graph& graph) {
  first_.resize(graph.values.size());
  for (size_t id = 0; id < first_.size(); ++id) first_[id] = static_cast<ValueId>(id);
  uses_end_.resize(graph.values.size(), 0);
  written_.resize(graph.alias_sets, false);
  for (size_t i : operators_) {
    const Operator& op = graph.operators[i];
    graph::for_each_argument(op, [&](ValueId value) {
      const bool is_number = graph::is_wrapped_number(graph.values[value].content);
      if (!is_number) uses_end_[first_[value]] = i + 1;
    });
    graph::for_each_same_tensor(op, [&](ValueId result, ValueId argument) {
      if (graph::writes_to(graph, op, argument)) first_[result] = first_[argument];
    });
    for (int set : op.writes) written_[set] = true;
  }
  for (ValueId output : graph.outputs) {
    if (output != kUndefined) uses_end_[first_[output]] = kReturned;
  }
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const ValueKind kind = graph.values[id].kind;
    const bool is_constant = kind == ValueKind::kConstant || kind == ValueKind::kLiteral;
    if (is_constant && uses_end_[id] > 0) constants_.push_back(static_cast<ValueId>(id));
  }
}

bool ExportPlan::is_used_from(ValueId value, size_t from) const {
  return uses_end_.at(value) > from;
}

bool ExportPlan::is_written(ValueId value) const {
  const int set = graph_.values[value].alias_set;
  return set >= 0 && written_[set];
}

}  // namespace smp::exported
