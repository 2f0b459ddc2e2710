// The part of Tracer that records operators, on data or on shapes.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "graph/content.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"
#include "graph/tracer.h"

namespace smp::graph {
namespace {

std::string common_prefix(const std::string& a, const std::string& b) {
  if (a == b) return a;
  size_t end = 0;
  for (size_t i = 0; i <= std::min(a.size(), b.size()); ++i) {
    const bool at_dot = (i == a.size() || a[i] == '.') && (i == b.size() || b[i] == '.');
    if (at_dot) end = i;
    if (i == a.size() || i == b.size() || a[i] != b[i]) break;
  }
  return a.substr(0, end);
}

}  // namespace

void Tracer::record(Call& call, torch::jit::Stack& stack) {
  Operator op(*call.op);
  op.arguments = call.arguments;
  op.mode = ExecutionMode::current();
  op.scope = last_scope_;
  op.first_result = static_cast<ValueId>(graph_->values.size());
  if (is_random(*call.op)) op.random_ordinal = random_count_++;
  for (ValueId id : call.ids) {
    if (id != kUndefined && graph_->values[id].kind == ValueKind::kParameter) {
      op.reads_parameter = true;
    }
  }
  note_writes(call, op);
  run_operator(call, op, stack);
  record_results(call, op, stack);
  note_reads_of_uninitialised(call, op);
  if (options_.execute) checksums_.push_back(checksum(op, stack));
  graph_->operators.push_back(std::move(op));
}

void Tracer::note_writes(const Call& call, Operator& op) {
  const auto& schema = call.op->schema();
  const bool statistics = writes_running_statistics(schema.name()) &&
                          call.arguments[5].constant.isBool() &&
                          call.arguments[5].constant.toBool();
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes =
        (alias != nullptr && alias->isWrite()) || (statistics && (i == 3 || i == 4));
    if (!writes) continue;
    for (ValueId id : call.arguments[i].values) {
      if (id != kUndefined) op.writes.push_back(graph_->values[id].alias_set);
    }
  }
  for (int alias_set : op.writes) {
    for (const Value& base : graph_->values) {
      if (base.alias_set != alias_set) continue;
      if (base.kind == ValueKind::kParameter) {
        refuse("operator " + op.name() + " writes parameter \"" + base.name + "\"",
               "Parameters may be changed outside the step function only: call optimizer.step() "
               "after the step has returned");
      }
      if (base.kind == ValueKind::kConstant) {
        refuse("operator " + op.name() +
                   " writes a tensor that was made outside the step function and is not "
                   "registered (hidden state)",
               "Register it as a buffer of the module");
      }
      break;
    }
  }
}

void Tracer::run_operator(const Call& call, const Operator& op, torch::jit::Stack& stack) {
  const bool host_may_write = !has_tensor_argument(call.op->schema()) && op.random_ordinal < 0;
  if (!options_.execute && !host_may_write) {
    run_on_shapes(call, stack);
  } else if (op.random_ordinal >= 0) {
    call_seeded(*call.op, stack, stream_seed(options_.random, op.random_ordinal));
  } else {
    call.op->callBoxed(stack);
  }
}

/// Replaces the arguments on the stack by results on the meta device.
void Tracer::run_on_shapes(const Call& call, torch::jit::Stack& stack) {
  shapes_.resize(graph_->values.size());
  const auto shape = [&](ValueId id) {
    if (id == kUndefined) return at::Tensor();
    if (!shapes_[id].defined()) shapes_[id] = make_shape_tensor(graph_->values[id].meta);
    return shapes_[id];
  };
  const auto& schema = call.op->schema();
  torch::jit::drop(stack, call.arguments.size());
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const Argument& argument = call.arguments[i];
    if (argument.kind == Argument::Kind::kTensor) {
      stack.push_back(shape(argument.values[0]));
    } else if (argument.kind == Argument::Kind::kTensorList) {
      c10::List<at::Tensor> list;
      for (ValueId id : argument.values) list.push_back(shape(id));
      stack.push_back(std::move(list));
    } else if (argument.kind == Argument::Kind::kOptionalTensorList) {
      c10::List<std::optional<at::Tensor>> list;
      for (ValueId id : argument.values) {
        list.push_back(id == kUndefined ? std::nullopt : std::optional(shape(id)));
      }
      stack.push_back(std::move(list));
    } else if (schema.arguments()[i].name() == "device" &&
               (argument.constant.isDevice() || call.tensors.empty())) {
      stack.push_back(c10::Device(at::kMeta));
    } else {
      stack.push_back(argument.constant);
    }
  }
  call_on_shapes(*call.op, stack);
}

/// The device a result would have had, when it was only made on the meta device.
static at::Device result_device(const std::vector<Argument>& arguments, const Graph& graph,
                                const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() == "device" && arguments[i].constant.isDevice()) {
      return arguments[i].constant.toDevice();
    }
  }
  for (const Argument& argument : arguments) {
    for (ValueId id : argument.values) {
      if (id != kUndefined && !graph.values[id].meta.sizes.empty()) {
        return graph.values[id].meta.device;
      }
    }
  }
  for (const Argument& argument : arguments) {
    for (ValueId id : argument.values) {
      if (id != kUndefined) return graph.values[id].meta.device;
    }
  }
  return at::kCPU;
}

void Tracer::record_results(const Call& call, Operator& op, torch::jit::Stack& stack) {
  const size_t returns = call.op->schema().returns().size();
  for (size_t i = stack.size() - returns; i < stack.size(); ++i) {
    if (stack[i].isTensorList()) {
      c10::List<at::Tensor> list;
      const auto results = stack[i].toTensorVector();
      for (const at::Tensor& result : results) list.push_back(record_result(call, op, result));
      op.list_lengths.push_back(static_cast<int>(results.size()));
      stack[i] = std::move(list);
    } else {
      stack[i] = record_result(call, op, stack[i].toTensor());
      op.list_lengths.push_back(-1);
    }
  }
}

/// Adds the value of one result and returns the tensor that the user's code gets.
at::Tensor Tracer::record_result(const Call& call, Operator& op, const at::Tensor& result) {
  if (!result.defined()) {
    op.results.push_back(kUndefined);
    op.result_is_argument.push_back(-1);
    return result;
  }
  if (result.layout() != at::kStrided) {
    refuse("operator " + op.name() + " returns a tensor that is not dense",
           "Convert it with to_dense(), or use dense tensors");
  }
  const bool shape_only = result.is_meta();
  const ValueId id = static_cast<ValueId>(graph_->values.size());
  int is_argument = -1;
  int alias_set = -1;
  for (size_t k = 0; k < call.ids.size(); ++k) {
    if (call.ids[k] == kUndefined) continue;
    const at::Tensor& argument = shape_only ? shapes_[call.ids[k]] : call.tensors[k];
    if (is_argument < 0 && argument.is_same(result)) is_argument = static_cast<int>(k);
    if (argument.has_storage() && argument.storage().is_alias_of(result.storage())) {
      alias_set = graph_->values[call.ids[k]].alias_set;
    }
  }
  Value value;
  value.meta = TensorMeta::of(result);
  if (shape_only) {
    value.meta.device = result_device(call.arguments, *graph_, call.op->schema());
  }
  value.producer = static_cast<int>(graph_->operators.size());
  if (alias_set < 0) alias_set = shape_only ? graph_->alias_sets++ : alias_set_of(result);
  value.alias_set = alias_set;
  const TensorMeta meta = value.meta;
  graph_->values.push_back(std::move(value));
  op.results.push_back(id);
  op.result_is_argument.push_back(is_argument);
  if (shape_only) {
    shapes_.resize(graph_->values.size());
    shapes_[id] = result;
  }
  at::Tensor tensor = result;
  if (shape_only) {
    tensor =
        is_argument >= 0 ? call.tensors[is_argument] : make_placeholder(meta, options_.step_name);
  }
  bind(tensor, id);
  const bool factory = call.ids.empty() && op.random_ordinal < 0 && !shape_only;
  if (factory) {
    const bool empty = is_uninitialised_factory(call.op->schema().name());
    fresh_[alias_set] = {id, empty ? at::Tensor() : clone_content(result)};
  }
  return tensor;
}

/// A factory's result that an operator reads before any operator wrote it, or whose content
/// changed since it was made, was filled by host code: it is a literal.
void Tracer::note_reads_of_uninitialised(const Call& call, const Operator& op) {
  if (fresh_.empty()) return;
  for (size_t k = 0; k < call.ids.size(); ++k) {
    if (call.ids[k] == kUndefined) continue;
    const int alias_set = graph_->values[call.ids[k]].alias_set;
    const auto it = fresh_.find(alias_set);
    if (it == fresh_.end()) continue;
    const bool written =
        std::find(op.writes.begin(), op.writes.end(), alias_set) != op.writes.end();
    bool viewed = false;
    for (ValueId id : op.results) {
      viewed |= id != kUndefined && graph_->values[id].alias_set == alias_set;
    }
    if (!written && viewed) continue;  // a view is no read
    if (!written) make_literal(it->second.id, call.tensors[k]);
    fresh_.erase(it);
  }
}

void Tracer::make_literal(ValueId base, const at::Tensor& alias) {
  Value& value = graph_->values[base];
  const at::Tensor& before = fresh_[value.alias_set].at_creation;
  at::NoGradGuard no_grad;
  at::Tensor whole = at::empty({0}, alias.options().dtype(value.meta.dtype));
  whole.set_(alias.storage(), 0, value.meta.sizes, value.meta.strides);
  if (before.defined() && same_content(whole, before)) return;
  value.kind = ValueKind::kLiteral;
  value.content = whole.clone();
}

uint64_t Tracer::checksum(const Operator& op, const torch::jit::Stack& stack) const {
  uint64_t hash = 1;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined()) hash = hash_content(tensor, hash);
  };
  for (ValueId id : op.results) {
    if (id == kUndefined) continue;
    const auto it = fresh_.find(graph_->values[id].alias_set);
    if (it != fresh_.end() && !it->second.at_creation.defined()) return 0;
  }
  const size_t returns = op.handle.schema().returns().size();
  for (size_t i = stack.size() - returns; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      add(stack[i].toTensor());
    } else {
      for (const at::Tensor& tensor : stack[i].toTensorVector()) add(tensor);
    }
  }
  return hash;
}

/// Operators without parameters belong to the innermost module that holds the operators with
/// parameters before and after them.
void Tracer::assign_scopes() {
  std::vector<std::string> next(graph_->operators.size() + 1);
  for (size_t i = graph_->operators.size(); i-- > 0;) {
    const Operator& op = graph_->operators[i];
    next[i] = op.reads_parameter ? op.scope : next[i + 1];
  }
  std::string previous;
  for (size_t i = 0; i < graph_->operators.size(); ++i) {
    Operator& op = graph_->operators[i];
    if (op.reads_parameter) {
      previous = op.scope;
    } else {
      op.scope = common_prefix(previous, next[i]);
    }
  }
}

}  // namespace smp::graph
