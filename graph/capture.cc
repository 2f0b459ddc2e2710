// SPDX-License-Identifier: Apache-2.0
#include "graph/capture.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "graph/alias_analysis.h"
#include "graph/content.h"
#include "graph/devices.h"
#include "graph/differentiate.h"
#include "graph/grad_shapes.h"
#include "graph/histories.h"
#include "graph/host_data.h"
#include "graph/late_writes.h"
#include "graph/mode_scope.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"
#include "graph/stack_tensors.h"
#include "graph/visit.h"
#include "graph/written_results.h"

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

/// The device a result would have had, when it was only made on the meta device: a number's only if
/// there is no other.
at::Device result_device(const Operator& op, const Graph& graph) {
  const auto& declared = op.handle.schema().arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].name() == "device" && op.arguments[i].constant.isDevice()) {
      return with_index(op.arguments[i].constant.toDevice());
    }
  }
  const TensorMeta* decides = nullptr;
  for_each_argument(op, [&](ValueId id) {
    const TensorMeta& meta = graph.values[id].meta;
    const bool is_better = decides == nullptr || (decides->sizes.empty() && !meta.sizes.empty());
    if (is_better) decides = &meta;
  });
  return decides == nullptr ? at::kCPU : decides->device;
}

}  // namespace

Capture::Capture(const TraceOptions& options, const Location& location, Graph prefix)
    : options_(options),
      location_(location),
      graph_(std::move(prefix)),
      concrete_(graph_.values.size()) {
  for (const Operator& op : graph_.operators) random_count_ += op.random_ordinal >= 0;
  for (size_t id = 0; id < graph_.values.size(); ++id) {
    first_aliases_.emplace(graph_.values[id].alias_set, static_cast<ValueId>(id));
  }
  restore_views();
}

/// Makes concrete tensors of the prefix views of each other where the program's are: a write
/// through one is seen by the others, and so is its gradient.
void Capture::restore_views() {
  for (const Operator& op : graph_.operators) {
    if (is_leaf(op.handle) || !acts_on_arguments(graph_, op)) continue;
    TracedCall call;
    call.op = &op.handle;
    call.arguments = op.arguments;
    for (const Argument& argument : op.arguments) {
      call.ids.insert(call.ids.end(), argument.values.begin(), argument.values.end());
    }
    call.tensors.resize(call.ids.size());
    const ModeScope mode(op.mode);
    torch::jit::Stack stack;
    stack.resize(call.arguments.size());
    run(call, op, stack);
    const std::vector<at::Tensor> results = tensors_in(stack, stack.size());
    for (size_t r = 0; r < results.size(); ++r) {
      if (op.results[r] != kUndefined) concrete_[op.results[r]].tensor = results[r];
    }
  }
}

const at::Tensor& Capture::concrete(ValueId id) {
  at::Tensor& tensor = concrete_[id].tensor;
  if (tensor.defined()) return tensor;
  const Value& value = graph_.values[id];
  tensor = make_shape_tensor(value.meta);
  if (value.content.defined()) stay_wrapped_number(value.content, tensor);
  return tensor;
}

/// Lets the data go that the function can no longer reach.
void Capture::forget_dead() {
  constexpr size_t kPeriod = 64;
  if (!options_.execute || graph_.operators.size() % kPeriod != 0) return;
  for (Concrete& value : concrete_) {
    if (value.user && value.user->expired()) value = {};
  }
}

ValueId Capture::add_value(Value value, at::Tensor concrete) {
  const auto id = static_cast<ValueId>(graph_.values.size());
  if (value.alias_set < 0) value.alias_set = graph_.alias_sets++;
  first_aliases_.emplace(value.alias_set, id);
  graph_.values.push_back(std::move(value));
  concrete_.resize(graph_.values.size());
  concrete_[id].tensor = std::move(concrete);
  return id;
}

ValueId Capture::add(Value value, const at::Tensor& tensor) {
  if (!options_.execute) return add_value(std::move(value), at::Tensor());
  // Operators give a buffer that they write a history, which ends with the step.
  const bool buffer = value.kind == ValueKind::kBuffer;
  return add_value(std::move(value), buffer ? tensor.variable_data() : tensor);
}

void Capture::settle(const HostMemory& memory, bool for_read) {
  if (!memory.filled(for_read)) return;
  graph_.values[memory.id].kind = ValueKind::kLiteral;
  graph_.values[memory.id].content = clone_content(memory.tensor);
}

void Capture::set_user(ValueId id, const at::Tensor& tensor) {
  auto& user = concrete_[id].user;
  user.reset();
  if (is_placeholder(tensor)) user = tensor.storage().getWeakStorageImpl();
}

void Capture::move_data(int alias_set, c10::StorageImpl& storage) {
  if (!options_.execute) return;
  const c10::Storage own(c10::Storage::use_byte_size_t(), storage.nbytes(),
                         std::move(storage._mutable_data_ptr_no_checks()), storage.allocator(),
                         /*resizable=*/storage.allocator() != nullptr);
  for (size_t id = 0; id < concrete_.size(); ++id) {
    const at::Tensor& tensor = concrete_[id].tensor;
    if (!tensor.defined() || graph_.values[id].alias_set != alias_set) continue;
    tensor.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(own);
  }
}

Operator Capture::make_operator(const TracedCall& call) {
  Operator op(*call.op);
  op.arguments = call.arguments;
  op.mode = call.mode;
  op.scope = location_.module();
  op.first_result = static_cast<ValueId>(graph_.values.size());
  if (is_random(*call.op)) op.random_ordinal = random_count_++;
  op.reads_parameter = std::any_of(call.ids.begin(), call.ids.end(), [&](ValueId id) {
    return id != kUndefined && value(id).kind == ValueKind::kParameter;
  });
  for (ValueId id : call.written()) op.writes.push_back(value(id).alias_set);
  return op;
}

void Capture::run(const TracedCall& call, const Operator& op, torch::jit::Stack& stack) {
  if (host_may_write(op.handle)) {
    call.op->callBoxed(stack);
    return;
  }
  push_concrete_arguments(call, stack);
  call_for_results(*call.op, stack, [&] { run_on_concrete(call, op, stack); });
}

/// The same with the arguments that it runs on.
void Capture::run_on_concrete(const TracedCall& call, const Operator& op,
                              torch::jit::Stack& stack) {
  if (is_leaf(*call.op)) {
    run_leaf(call, op, stack);
  } else if (!options_.execute && *call.op == grad_operator()) {
    std::vector<at::Tensor> shapes;
    for (ValueId id : call.ids) shapes.push_back(id == kUndefined ? at::Tensor() : concrete(id));
    torch::jit::drop(stack, call.arguments.size());
    stack.push_back(grad_on_shapes(graph_, op, shapes));
  } else if (!options_.execute) {
    call_on_shapes(*call.op, stack, result_device(op, graph_));
  } else if (op.random_ordinal >= 0) {
    call_seeded(*call.op, stack, stream_seed(options_.random, op.random_ordinal));
  } else {
    call.op->callBoxed(stack);
  }
}

/// Puts on the stack, in place of the function's arguments, those that the operator runs on.
void Capture::push_concrete_arguments(const TracedCall& call, torch::jit::Stack& stack) {
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
void Capture::run_leaf(const TracedCall& call, const Operator& op, torch::jit::Stack& stack) {
  const LeafCallPtr leaf = leaf_call(call.arguments[0].constant);
  std::vector<at::Tensor> results;
  if (options_.execute) {
    results = run_leaf_on_data(*leaf, op, stack);
  } else {
    torch::jit::drop(stack, call.arguments.size());
    std::vector<std::optional<TensorMeta>> inputs;
    for (ValueId id : call.arguments[2].values) {
      inputs.push_back(id == kUndefined ? std::nullopt : std::optional(graph_.values[id].meta));
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
        return id != kUndefined && graph_.values[id].meta.requires_grad;
      });
  for (const at::Tensor& result : results) {
    if (!differentiable || !result.defined()) continue;
    if (result.is_floating_point() || result.is_complex()) give_placeholder_history(result);
  }
  stack.push_back(std::move(results));
}

/// Takes the leaf's arguments from the stack and returns its results, without their history.
std::vector<at::Tensor> Capture::run_leaf_on_data(const LeafCall& leaf, const Operator& op,
                                                  torch::jit::Stack& stack) {
  const size_t first = stack.size() - op.arguments.size();
  std::vector<at::Tensor> entered = stack[first + 2].toTensorVector();  // inputs, then state
  const auto state = stack[first + 3].toTensorVector();
  entered.insert(entered.end(), state.begin(), state.end());
  call_seeded(op.handle, stack, stream_seed(options_.random, op.random_ordinal));
  placeholder_history().tensor_pre_hooks().clear();  // a leaf may have hooks on its inputs
  std::vector<at::Tensor> results = torch::jit::pop(stack).toTensorVector();
  for (const at::Tensor& parameter : undeclared_parameters(leaf, entered, results)) {
    const auto* entry = options_.tensors().find(parameter);
    if (entry == nullptr) continue;
    location_.refuse("leaf module \"" + leaf.module + "\" uses parameter \"" + entry->name +
                         "\", which is not its own",
                     "Register it in the leaf too (register_parameter, register_module)");
  }
  for (at::Tensor& result : results) {
    if (result.defined()) result = result.variable_data();
  }
  return results;
}

ValueId Capture::add_result(const TracedCall& call, Operator& op, const at::Tensor& result) {
  if (!result.defined()) {
    op.results.push_back(kUndefined);
    op.result_is_argument.push_back(-1);
    return kUndefined;
  }
  int is_argument = -1;
  Value value;
  for (size_t k = 0; k < call.ids.size(); ++k) {
    if (call.ids[k] == kUndefined) continue;
    const at::Tensor& argument = concrete(call.ids[k]);
    if (is_argument < 0 && argument.is_same(result)) is_argument = static_cast<int>(k);
    if (argument.has_storage() && argument.storage().is_alias_of(result.storage())) {
      value.alias_set = graph_.values[call.ids[k]].alias_set;
    }
  }
  value.meta = TensorMeta::of(result);
  if (result.is_meta()) value.meta.device = result_device(op, graph_);
  value.producer = static_cast<int>(graph_.operators.size());
  // Tensors that host code may fill stay the function's alone, or `torch::zeros` returns a copy.
  const ValueId id = host_may_write(op.handle) ? add(std::move(value), result.variable_data())
                                               : add_value(std::move(value), result);
  op.results.push_back(id);
  op.result_is_argument.push_back(is_argument);
  if (has_trait(call.op->schema().name(), OperatorTrait::kLeavesUninitialised)) {
    uninitialised_.insert(graph_.values[id].alias_set);
  }
  return id;
}

void Capture::add(Operator op, bool may_be_filled) {
  if (options_.execute) checksums_.push_back(may_be_filled ? 0 : checksum(op));
  graph_.operators.push_back(std::move(op));
  forget_dead();
}

std::vector<LiveResult> Capture::live_results() const {
  std::vector<LiveResult> results;
  for (size_t id = 0; id < concrete_.size(); ++id) {
    const auto& user = concrete_[id].user;
    if (user && !user->expired()) results.push_back({static_cast<ValueId>(id), *user});
  }
  return results;
}

std::unique_ptr<Graph> Capture::finish(const std::vector<ValueId>& outputs,
                                       const std::vector<BackwardRoot>& roots) {
  for (size_t i = 0; i < graph_.values.size() && graph_.values[i].kind == ValueKind::kInput; ++i) {
    graph_.inputs.push_back(static_cast<ValueId>(i));
  }
  graph_.outputs = outputs;
  graph_.roots = roots;
  check_late_writes();
  check_written_parameters();
  check_buffers();
  assign_scopes();
  check_histories(graph_, options_.step_name);
  return std::make_unique<Graph>(std::move(graph_));
}

/// Tensors written after `backward` are written to a copy where a backward may need the old content
/// (`late_writes.h`). But a leaf works on the buffers of its module themselves.
void Capture::check_late_writes() const {
  const std::vector<int> separated = sets_to_separate(graph_);
  for (const Operator& op : graph_.operators) {
    if (!is_leaf(op.handle)) continue;
    for_each_argument(op, [&](ValueId id) {
      const int alias_set = graph_.values[id].alias_set;
      const Value& base = this->base(alias_set);
      const bool lasts = base.kind == ValueKind::kBuffer || base.kind == ValueKind::kParameter;
      const bool writes = std::count(op.writes.begin(), op.writes.end(), alias_set) > 0;
      if (separated[alias_set] == kNeverSeparated || !lasts || !writes) return;
      core::fail<CaptureError>("step function \"", options_.step_name, "\": buffer \"", base.name,
                               "\" of leaf module \"", leaf_call(op.arguments[0].constant)->module,
                               "\" is written after backward, and an operator before it has read "
                               "the buffer, so that its "
                               "backward may need what was there. Call model->backward after "
                               "whatever writes the buffer, "
                               "or read a copy of it: buffer.clone()");
    });
  }
}

/// A leaf that writes parameters keeps copies of the values that its own backward needs.
void Capture::check_written_parameters() const {
  if (graph_.roots.empty()) return;
  std::vector<const Operator*> writer(graph_.alias_sets, nullptr);
  for (const Operator& op : graph_.operators) {
    for (int set : op.writes) {
      const bool parameter = base(set).kind == ValueKind::kParameter;
      if (parameter) writer[set] = &op;
    }
  }
  for (const Operator& op : graph_.operators) {
    if (is_leaf(op.handle)) continue;
    for_each_argument(op, [&](ValueId id) {
      const int set = graph_.values[id].alias_set;
      if (writer[set] == nullptr) return;
      core::fail<CaptureError>(
          "step function \"", options_.step_name, "\": leaf module \"",
          leaf_call(writer[set]->arguments[0].constant)->module, "\" writes parameter \"",
          base(set).name, "\", and operator ", op.name(),
          " reads it, whose backward may need what was there. Let leaves only read it, or give the "
          "operator a copy that the leaf returns: weight.clone()");
    });
  }
}

/// A step has sums for the gradients of parameters only.
void Capture::check_buffers() const {
  for (const Value& value : graph_.values) {
    const bool wants_sum = value.kind == ValueKind::kBuffer && value.meta.requires_grad;
    SMP_CHECK_WITH(CaptureError, graph_.roots.empty() || !wants_sum, "step function \"",
                   options_.step_name, "\" calls backward and reads buffer \"", value.name,
                   "\", which requires a gradient. Register it with register_parameter, or call "
                   "requires_grad_(false) on it before the step");
  }
}

uint64_t Capture::checksum(const Operator& op) {
  uint64_t hash = 1;
  for (ValueId id : op.results) {
    if (id == kUndefined) continue;
    if (uninitialised_.count(graph_.values[id].alias_set) > 0) return 0;
    hash = hash_content(concrete(id), hash);
  }
  return hash;
}

/// Operators without parameters, of which nothing says the module, belong to the innermost module
/// that holds the operators with parameters before and after them.
void Capture::assign_scopes() {
  const std::vector<bool>& modules_known = location_.modules_known();
  const auto is_known = [&](size_t i) {
    return graph_.operators[i].reads_parameter || (i < modules_known.size() && modules_known[i]);
  };
  std::vector<std::string> next(graph_.operators.size() + 1);
  for (size_t i = graph_.operators.size(); i-- > 0;) {
    const Operator& op = graph_.operators[i];
    next[i] = is_known(i) ? op.scope : next[i + 1];
  }
  std::string previous;
  for (size_t i = 0; i < graph_.operators.size(); ++i) {
    Operator& op = graph_.operators[i];
    if (is_known(i)) {
      previous = op.scope;
    } else {
      op.scope = common_prefix(previous, next[i]);
    }
  }
}

}  // namespace smp::graph
