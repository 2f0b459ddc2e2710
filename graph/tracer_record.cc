// The part of Tracer that records operators, on data or on shapes.

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <utility>

#include "graph/alias_analysis.h"
#include "graph/content.h"
#include "graph/devices.h"
#include "graph/differentiate.h"
#include "graph/grad_shapes.h"
#include "graph/leaf.h"
#include "graph/operator_traits.h"
#include "graph/requires_grad.h"
#include "graph/shapes.h"
#include "graph/tracer.h"
#include "graph/visit.h"

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

/// The device a result would have had, when it was only made on the meta device.
at::Device result_device(const std::vector<Argument>& arguments, const Graph& graph,
                         const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() == "device" && arguments[i].constant.isDevice()) {
      return with_index(arguments[i].constant.toDevice());
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

}  // namespace

void Tracer::record(Call& call, torch::jit::Stack& stack) {
  Operator op(*call.op);
  op.arguments = call.arguments;
  op.mode = mode();
  op.scope = last_scope();
  op.first_result = static_cast<ValueId>(graph_->values.size());
  if (is_random(*call.op)) op.random_ordinal = random_count_++;
  for (ValueId id : call.ids) {
    if (id != kUndefined && graph_->values[id].kind == ValueKind::kParameter) {
      op.reads_parameter = true;
    }
  }
  note_writes(call, op);
  settle_written(op);
  run_operator(call, op, stack);
  record_results(call, op, stack);
  spread_history(op, static_cast<int>(graph_->operators.size()));
  settle_read(call, op);
  if (options_.execute) checksums_.push_back(checksum(op));
  graph_->operators.push_back(std::move(op));
  forget_dead();
}

void Tracer::note_writes(const Call& call, Operator& op) {
  for (ValueId id : written_by(call)) op.writes.push_back(graph_->values[id].alias_set);
  for (int alias_set : op.writes) {
    const Value& base = graph_->values[first_aliases_.at(alias_set)];
    if (base.kind == ValueKind::kParameter && !is_leaf(op.handle)) {
      refuse("operator " + op.name() + " writes parameter \"" + base.name + "\"",
             "Parameters may be changed outside the step function only: call optimizer.step() "
             "after the step has returned");
    }
    if (base.kind == ValueKind::kConstant) {
      refuse("operator " + op.name() +
                 " writes a tensor that was made outside the step function and is not registered "
                 "(hidden state)",
             "Register it as a buffer of the module");
    }
  }
}

/// What operators run on in place of what the function holds: a tensor with the data of this run,
/// or one of the same shape on the meta device.
const at::Tensor& Tracer::concrete(ValueId id) {
  concrete_.resize(graph_->values.size());
  at::Tensor& tensor = concrete_[id].tensor;
  if (!tensor.defined()) tensor = make_shape_tensor(graph_->values[id].meta);
  return tensor;
}

/// Lets the data go that the function can no longer reach.
void Tracer::forget_dead() {
  constexpr size_t kPeriod = 64;
  if (!options_.execute || graph_->operators.size() % kPeriod != 0) return;
  for (Concrete& value : concrete_) {
    if (value.user && value.user->expired()) value = {};
  }
}

void Tracer::run_operator(const Call& call, const Operator& op, torch::jit::Stack& stack) {
  const auto& schema = call.op->schema();
  if (host_may_write(op.handle)) {
    call.op->callBoxed(stack);
    return;
  }
  push_concrete_arguments(call, stack);
  if (is_leaf(*call.op)) {
    run_leaf(call, op, stack);
  } else if (!options_.execute && *call.op == grad_operator()) {
    std::vector<at::Tensor> shapes;
    for (ValueId id : call.ids) shapes.push_back(id == kUndefined ? at::Tensor() : concrete(id));
    torch::jit::drop(stack, call.arguments.size());
    stack.push_back(grad_on_shapes(*graph_, op, shapes));
  } else if (!options_.execute) {
    call_on_shapes(*call.op, stack, result_device(op.arguments, *graph_, schema));
  } else if (op.random_ordinal >= 0) {
    call_seeded(*call.op, stack, stream_seed(options_.random, op.random_ordinal));
  } else {
    call.op->callBoxed(stack);
  }
}

/// Puts on the stack, in place of the function's arguments, those that the operator runs on.
void Tracer::push_concrete_arguments(const Call& call, torch::jit::Stack& stack) {
  const auto tensor = [&](ValueId id) { return id == kUndefined ? at::Tensor() : concrete(id); };
  const auto& schema = call.op->schema();
  torch::jit::drop(stack, call.arguments.size());
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const Argument& argument = call.arguments[i];
    const bool device_of_result = !options_.execute && schema.arguments()[i].name() == "device" &&
                                  (argument.constant.isDevice() || call.tensors.empty());
    stack.push_back(device_of_result ? c10::IValue(c10::Device(at::kMeta))
                                     : to_ivalue(argument, tensor));
  }
}

/// A leaf runs on its arguments' data or, on shapes, on zeros. Whether a result of it requires a
/// gradient may depend on data (no token for any expert), so one does where it may.
void Tracer::run_leaf(const Call& call, const Operator& op, torch::jit::Stack& stack) {
  const LeafCallPtr leaf = leaf_call(call.arguments[0].constant);
  std::vector<at::Tensor> results;
  if (options_.execute) {
    results = run_leaf_on_data(*leaf, op, stack);
  } else {
    torch::jit::drop(stack, call.arguments.size());
    std::vector<std::optional<TensorMeta>> inputs;
    for (ValueId id : call.arguments[2].values) {
      inputs.push_back(id == kUndefined ? std::nullopt : std::optional(graph_->values[id].meta));
    }
    for (const at::Tensor& result : run_leaf_on_zeros(leaf, inputs)) {
      TensorMeta meta;
      if (result.defined()) meta = TensorMeta::of(result);
      meta.requires_grad = false;
      results.push_back(result.defined() ? make_shape_tensor(meta) : result);
    }
  }
  const bool differentiable =
      at::GradMode::is_enabled() && std::any_of(call.ids.begin(), call.ids.end(), [&](ValueId id) {
        return id != kUndefined && graph_->values[id].meta.requires_grad;
      });
  for (const at::Tensor& result : results) {
    if (!differentiable || !result.defined()) continue;
    if (result.is_floating_point() || result.is_complex()) give_placeholder_history(result);
  }
  stack.push_back(std::move(results));
}

/// Takes the leaf's arguments from the stack and returns its results, without their history.
std::vector<at::Tensor> Tracer::run_leaf_on_data(const LeafCall& leaf, const Operator& op,
                                                 torch::jit::Stack& stack) {
  const auto inputs = stack[stack.size() - op.arguments.size() + 2].toTensorVector();
  call_seeded(op.handle, stack, stream_seed(options_.random, op.random_ordinal));
  history_->tensor_pre_hooks().clear();  // a leaf may have hooks on its inputs
  std::vector<at::Tensor> results = torch::jit::pop(stack).toTensorVector();
  for (const at::Tensor& parameter : undeclared_parameters(leaf, inputs, results)) {
    const auto* entry = options_.table->find(parameter);
    if (entry == nullptr) continue;
    refuse("leaf module \"" + leaf.module + "\" uses parameter \"" + entry->name +
               "\", which is not its own",
           "Register it in the leaf too (register_parameter, register_module)");
  }
  for (at::Tensor& result : results) {
    if (result.defined()) result = result.variable_data();
  }
  return results;
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
    refuse(
        "operator " + op.name() + " returns a tensor that is not dense",
        "Convert it with to_dense(), or make the module that uses it a leaf: smp::leaf(module)(x)");
  }
  const ValueId id = static_cast<ValueId>(graph_->values.size());
  int is_argument = -1;
  int alias_set = -1;
  for (size_t k = 0; k < call.ids.size(); ++k) {
    if (call.ids[k] == kUndefined) continue;
    const at::Tensor& argument = concrete(call.ids[k]);
    if (is_argument < 0 && argument.is_same(result)) is_argument = static_cast<int>(k);
    if (argument.has_storage() && argument.storage().is_alias_of(result.storage())) {
      alias_set = graph_->values[call.ids[k]].alias_set;
    }
  }
  Value value;
  value.meta = TensorMeta::of(result);
  if (result.is_meta()) {
    value.meta.device = result_device(call.arguments, *graph_, call.op->schema());
  }
  value.producer = static_cast<int>(graph_->operators.size());
  value.alias_set = alias_set < 0 ? graph_->alias_sets++ : alias_set;
  first_aliases_.emplace(value.alias_set, id);
  const TensorMeta meta = value.meta;
  graph_->values.push_back(std::move(value));
  op.results.push_back(id);
  op.result_is_argument.push_back(is_argument);
  concrete_.resize(graph_->values.size());
  const bool uninitialised =
      has_trait(call.op->schema().name(), OperatorTrait::kLeavesUninitialised);
  if (uninitialised) uninitialised_.insert(graph_->values[id].alias_set);
  if (host_may_write(op.handle)) {
    bind(result, id);
    note_factory(id, graph_->values[id].alias_set, result, uninitialised);
    // Not the result itself: it stays the function's alone, or `torch::zeros` returns a copy.
    if (options_.execute) concrete_[id].tensor = result.variable_data();
    return result;
  }
  concrete_[id].tensor = result;
  at::Tensor tensor =
      is_argument >= 0 ? call.tensors[is_argument] : make_placeholder(meta, options_.step_name);
  if (is_argument >= 0) follow(tensor, meta);
  if (is_placeholder(tensor)) concrete_[id].user = tensor.storage().getWeakStorageImpl();
  bind(tensor, id);
  return tensor;
}

/// Lets what the function holds show what an operator did to it in place. Parameters and buffers
/// are left alone: they outlive the run.
void Tracer::follow(const at::Tensor& tensor, const TensorMeta& meta) {
  if (options_.table->find(tensor) != nullptr) return;
  history_begins_ |= meta.requires_grad && !tensor.requires_grad();
  follow_in_place(tensor, meta);
}

/// What an operator writes with a history has it wherever the memory is seen: the function's other
/// views of it require a gradient from now on.
void Tracer::spread_history(const Operator& op, int index) {
  if (!std::exchange(history_begins_, false)) return;
  const auto requires_grad_now = [&](ValueId id) {
    if (!verifying()) return concrete(id).requires_grad();
    auto& recorded = live_[0].requires_grad;
    if (!recorded) recorded.emplace(*live_[0].graph);
    return recorded->since(id) <= index;
  };
  for (auto& [impl, known] : known_) {
    const int set = value(known.id).alias_set;
    if (std::find(op.writes.begin(), op.writes.end(), set) == op.writes.end()) continue;
    const auto owner = known.keep.lock();
    if (!owner) continue;
    const at::Tensor tensor{owner};
    if (tensor.requires_grad() || options_.table->find(tensor) != nullptr) continue;
    if (!requires_grad_now(known.id)) continue;
    give_placeholder_history(tensor);
    bind(tensor, known.id);
  }
}

bool Tracer::HostData::changed() const { return hash_content(tensor) != content; }

/// Whether an operator that is about to use it for the first time finds what host code put there.
bool Tracer::HostData::filled(bool for_read) const {
  return !is_read && ((for_read && uninitialised) || changed());
}

/// From now on host code may fill the factory's result. What `empty` returns is marked first, so
/// that it shows whether it was filled, even with what the memory happened to hold.
void Tracer::note_factory(ValueId id, int alias_set, const at::Tensor& result, bool uninitialised) {
  if (uninitialised) mark_uninitialised(result);
  host_data_[alias_set] = {id, result.variable_data(), hash_content(result), uninitialised};
}

/// An operator has read the constant. A large one is looked at once in a run.
void Tracer::note_constant(ValueId id, int alias_set, const at::Tensor& tensor) {
  if (!is_small_on_cpu(TensorMeta::of(tensor))) return;
  host_data_[alias_set] = {id, tensor, hash_content(tensor), false, /*is_read=*/true};
}

/// Takes what host code filled for a literal: an operator reads it, or writes it and may leave
/// parts as they are.
void Tracer::settle(HostData& data, bool for_read) {
  if (data.is_read) {
    // A large one is looked at when it is written, or at the end.
    if (!for_read || is_small_on_cpu(TensorMeta::of(data.tensor))) check_unchanged(data);
    return;
  }
  if (!verifying()) {
    if (data.filled(for_read)) make_literal(data);
  } else if (differs_from_literal(data)) {
    literals_.emplace_back(data.id, clone_content(data.tensor));
  }
  if (!for_read) return;
  data.content = hash_content(data.tensor);
  data.is_read = true;
}

/// Whether it holds something else than a known graph's literal.
bool Tracer::differs_from_literal(const HostData& data) const {
  return std::any_of(live_.begin(), live_.end(), [&](const Live& live) {
    const Value& known = live.graph->values[data.id];
    return known.kind == ValueKind::kLiteral && !same_content(known.content, data.tensor);
  });
}

void Tracer::check_unchanged(const HostData& data) const {
  if (!data.changed()) return;
  refuse(c10::str("changes the data of a tensor of shape ", data.tensor.sizes(),
                  " on the host after an operator has read it"),
         "A tensor that host code fills has one content in a run: make another tensor for other "
         "data (torch::tensor(vector), clone())");
}

void Tracer::settle_written(const Operator& op) {
  for (int alias_set : op.writes) {
    const auto it = host_data_.find(alias_set);
    if (it == host_data_.end()) continue;
    settle(it->second, /*for_read=*/false);
    withhold(alias_set);
  }
}

/// An operator writes what host code could fill until now: from here on it is the data of this run,
/// which the function does not see.
void Tracer::withhold(int alias_set) {
  const auto it = host_data_.find(alias_set);
  const HostData& data = it->second;
  if (options_.execute) move_data(alias_set, *data.tensor.storage().unsafeGetStorageImpl());
  become_placeholder(data.tensor, options_.step_name);
  if (!verifying()) {
    concrete_.resize(graph_->values.size());
    concrete_[data.id].user = data.tensor.storage().getWeakStorageImpl();
  }
  host_data_.erase(it);
}

/// Gives the tensors that operators run on, in place of those on `storage`, the data for their own.
void Tracer::move_data(int alias_set, c10::StorageImpl& storage) {
  const c10::Storage own(c10::Storage::use_byte_size_t(), storage.nbytes(),
                         std::move(storage._mutable_data_ptr_no_checks()), storage.allocator(),
                         /*resizable=*/storage.allocator() != nullptr);
  for (size_t id = 0; id < concrete_.size(); ++id) {
    const at::Tensor& tensor = concrete_[id].tensor;
    if (!tensor.defined() || graph_->values[id].alias_set != alias_set) continue;
    tensor.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(own);
  }
}

/// To return the memory itself, or a view of it, is not to read it.
void Tracer::settle_read(const Call& call, const Operator& op) {
  if (host_data_.empty()) return;
  const Graph& graph = verifying() ? *live_[0].graph : *graph_;
  for (ValueId argument : call.ids) {
    if (argument != kUndefined && !has_result_on(graph, op, value(argument).alias_set)) {
      settle_read(argument);
    }
  }
}

void Tracer::settle_read(ValueId id) {
  const auto it = host_data_.find(value(id).alias_set);
  if (it != host_data_.end()) settle(it->second, /*for_read=*/true);
}

void Tracer::make_literal(const HostData& data) {
  Value& value = graph_->values[data.id];
  value.kind = ValueKind::kLiteral;
  value.content = clone_content(data.tensor);
}

uint64_t Tracer::checksum(const Operator& op) {
  uint64_t hash = 1;
  for (ValueId id : op.results) {
    if (id == kUndefined) continue;
    if (uninitialised_.count(graph_->values[id].alias_set) > 0) return 0;
    hash = hash_content(concrete(id), hash);
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
