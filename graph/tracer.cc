// SPDX-License-Identifier: Apache-2.0
#include "graph/tracer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <algorithm>

#include "core/check.h"
#include "graph/capture.h"
#include "graph/content.h"
#include "graph/differentiate.h"
#include "graph/engine.h"
#include "graph/guard.h"
#include "graph/leaf.h"
#include "graph/not_equal.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"
#include "graph/stack_tensors.h"
#include "graph/step_rules.h"
#include "graph/written_results.h"

namespace smp::graph {
namespace {

thread_local Tracer* active = nullptr;

/// Whether the program itself has the data of the call's tensors: constants made outside, and
/// memory that host code may fill. It is the same for all microbatches, and the program reads it in
/// each step.
bool is_host_data(const std::vector<at::Tensor>& tensors, const TensorTable& table) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return !tensor.defined() || (!is_placeholder(tensor) && table.find_storage(tensor) == nullptr);
  });
}

}  // namespace

Tracer* Tracer::current() { return active; }

Tracer::Tracer(TraceOptions options)
    : options_(std::move(options)),
      location_(options_.step_name, options_.tensors()),
      histories_(location_) {}
Tracer::~Tracer() = default;

RunGraph& Tracer::run_graph() const {
  if (guard_ != nullptr) return *guard_;
  return *capture_;
}

const Value& Tracer::value(ValueId id) const {
  return guard_ != nullptr ? guard_->value(id) : capture_->value(id);
}

TraceResult Tracer::run(const std::vector<at::Tensor>& inputs, const Function& function) {
  SMP_INTERNAL_ASSERT(!options_.execute || options_.candidates.empty(),
                      "a run that executes is compared with no other");
  std::vector<at::Tensor> passed;
  define_inputs(inputs, passed);
  install_engine();
  active = this;
  const auto ended = c10::make_scope_exit([this] {
    histories_.end();
    active = nullptr;
  });
  const std::vector<at::Tensor> outputs = run_function(function, passed);
  passed.clear();  // tensors that are still there now are held elsewhere
  return finish(outputs);
}

void Tracer::define_inputs(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& passed) {
  std::vector<Value> values;
  for (size_t i = 0; i < inputs.size(); ++i) {
    SMP_CHECK_WITH(CaptureError, !inputs[i].requires_grad(), "step function \"", options_.step_name,
                   "\": input ", i,
                   " requires a gradient; a step trains the parameters of its models only. Pass "
                   "input.detach(), and call requires_grad_() inside if autograd::grad needs it");
    Value value;
    value.kind = ValueKind::kInput;
    value.name = std::to_string(i);
    value.meta = TensorMeta::of(inputs[i]);
    values.push_back(std::move(value));
    passed.push_back(make_placeholder(values.back().meta, options_.step_name));
  }
  guard_ = std::make_unique<Guard>(options_.candidates, values);
  if (guard_->follows_any()) {
    for (size_t i = 0; i < passed.size(); ++i) known_.bind(passed[i], static_cast<ValueId>(i));
    return;
  }
  if (!options_.candidates.empty()) {
    difference_ = difference_of_inputs(values, *options_.candidates.front());
  }
  guard_.reset();
  capture_ = std::make_unique<Capture>(options_, location_);
  for (size_t i = 0; i < passed.size(); ++i) {
    known_.bind(passed[i], capture_->add(std::move(values[i]), inputs[i]));
  }
}

/// libtorch's own errors, of shapes and types that do not fit, do not say where.
std::vector<at::Tensor> Tracer::run_function(const Function& function,
                                             const std::vector<at::Tensor>& inputs) {
  try {
    const InterceptScope intercept(*this);
    return function(inputs);
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    // Its interpreter throws errors of its own, which are these ...
    check_torch_script(script_operator_, location_);
    core::fail<Error>(location_.to_string(), ": ", core::text_without_prefix(error));
  } catch (const std::exception&) {
    // ... or, before libtorch 2.15, std::runtime_error
    check_torch_script(script_operator_, location_);
    throw;
  }
}

TraceResult Tracer::finish(const std::vector<at::Tensor>& outputs) {
  histories_.check_end();
  std::vector<ValueId> ids;
  for (const at::Tensor& output : outputs) {
    ids.push_back(lookup(output));
    settle_end(ids.back());
  }
  host_data_.check_large(location_);
  if (guard_ != nullptr) {
    if (auto match = guard_->match(ids, roots_)) return *std::move(match);
    start_capture(c10::str("the function ends after ", guard_->size(),
                           " operators, or returns or differentiates other tensors"));
  }
  TraceResult result;
  result.recorded = capture_->finish(ids, roots_);
  result.difference = difference_;
  result.checksums = capture_->checksums();
  result.kept = capture_->live_results();
  // The tracer no longer counts among those that hold the function's tensors.
  capture_.reset();
  host_data_.clear();
  histories_.end();
  root_tensors_.clear();
  result.left = known_.left_behind(outputs);
  return result;
}

ExecutionMode Tracer::mode() const {
  ExecutionMode mode = ExecutionMode::current();
  mode.after_backward = backwards_;
  return mode;
}

void Tracer::call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  histories_.check_hooks();
  if (torch::jit::in_torchscript_runtime()) {
    script_operator_ = op.schema().name();
    check_torch_script(script_operator_, location_);
  }
  // An operator of the known graph does not answer the host.
  const bool expected = guard_ != nullptr && guard_->expects(op);
  if (!expected && answer_host_value(op, stack)) return;
  // Taken while it is in use: a call may derive a value with a call of its own.
  TracedCall current = std::move(spare_call_);
  collect(op, stack, current);
  if (!roots_.empty()) keep_roots(current);
  if (guard_ == nullptr || !guard(current, stack)) {
    check_call(current, *capture_, location_);
    capture(current, stack);
  }
  current.clear();
  spare_call_ = std::move(current);
}

void Tracer::collect(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                     TracedCall& call) {
  const c10::OperatorHandle* outer = std::exchange(reading_, &op);
  call.read(op, stack, [this](const at::Tensor& tensor) { return lookup(tensor); });
  reading_ = outer;
  call.mode = mode();
  for (ValueId id : call.ids) {
    if (id == kUndefined) continue;
    const Value& value = this->value(id);
    if (value.kind == ValueKind::kParameter) location_.note_read_parameter(value.name);
  }
  if (histories_.has_custom_functions()) histories_.watch_custom_functions(call);
  call.make_offset_relative(options_.tensors());
}

/// Handles operators with results that are no tensors; false if all results are tensors.
bool Tracer::answer_host_value(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  if (!returns_host_value(schema)) return false;
  const std::string& name = schema.name();
  const std::vector<at::Tensor> tensors = tensors_in(stack, schema.arguments().size());
  if (name == "aten::equal") {
    const at::Tensor &a = tensors[0], &b = tensors[1];
    const bool same = a.is_same(b);
    if (same || a.sizes() != b.sizes() || differ(a, b)) {
      torch::jit::drop(stack, 2);
      stack.push_back(same);
      return true;
    }
  } else if (has_trait(name, OperatorTrait::kReadsMetadata) || !has_tensor_argument(schema) ||
             is_host_data(tensors, options_.tensors())) {
    op.callBoxed(stack);
    return true;
  }
  refuse_host_read(name, tensors, location_);
}

/// Whether the program may go on as it does where two tensors differ in data, which each microbatch
/// is to check. Attention asks whether its query is its key.
bool Tracer::differ(const at::Tensor& a, const at::Tensor& b) {
  const UninterceptedScope own;
  if (options_.execute && at::equal(capture_->concrete(lookup(a)), capture_->concrete(lookup(b)))) {
    return false;
  }
  torch::jit::Stack arguments{a, b};
  call(not_equal_operator(), arguments);
  return true;
}

/// Whether the call is one of a known graph; it gets the results captured there.
bool Tracer::guard(const TracedCall& call, torch::jit::Stack& stack) {
  if (auto difference = guard_->compare(call, host_data_)) {
    start_capture(*std::move(difference));
    return false;
  }
  const auto constants = guard_->added_constants();
  location_.note_operator(guard_->size());
  const Operator& op = guard_->advance();
  host_data_.settle_written(op, *guard_, location_);
  host_data_.settle_read(op, call, *guard_, location_);
  host_data_.add_constants(constants, *guard_);
  push_captured_results(call, op, stack);
  spread_history(op);
  return true;
}

/// From here on the run is another one than the known graphs.
void Tracer::start_capture(std::string difference) {
  difference_ = std::move(difference);
  const auto constants = guard_->added_constants();
  capture_ = std::make_unique<Capture>(options_, location_, guard_->prefix());
  guard_.reset();
  host_data_.add_constants(constants, *capture_);
}

void Tracer::push_captured_results(const TracedCall& call, const Operator& op,
                                   torch::jit::Stack& stack) {
  const Graph& graph = guard_->graph();
  const bool factory = call.tensors.empty() && host_may_write(*call.op);
  if (factory && (graph.makes_literal(op) || is_small_on_cpu(value(op.results[0]).meta))) {
    // Host code may be about to write into it, even if no operator reads it then.
    call.op->callBoxed(stack);
    const at::Tensor& result = stack.back().toTensor();
    give_factory_result(op, op.results[0], result);
    return;
  }
  if (is_leaf(*call.op)) {
    leaf_call(call.arguments[0].constant)->keep_result_of(*leaf_call(op.arguments[0].constant));
  }
  torch::jit::drop(stack, call.arguments.size());
  size_t next = 0;
  const auto take = [&] {
    const size_t i = next++;
    return op.results[i] == kUndefined ? at::Tensor()
                                       : stand_in(call, op.results[i], op.result_is_argument[i]);
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
  // Drops tensors that the operator writes and does not return.
  torch::jit::drop(stack, op.list_lengths.size() - call.op->schema().returns().size());
}

void Tracer::capture(const TracedCall& call, torch::jit::Stack& stack) {
  Operator op = capture_->make_operator(call);
  location_.note_operator(capture_->graph().operators.size());
  check_writes(op, *capture_, location_);
  host_data_.settle_written(op, *capture_, location_);
  const auto run = [&] { capture_->run(call, op, stack); };
  if (is_leaf(op.handle)) {
    histories_.hide_while(run);
  } else {
    run();
  }
  const size_t written = has_written_results(*call.op) ? 1 : 0;
  const size_t results = call.op->schema().returns().size() + written;
  for (size_t i = stack.size() - results; i < stack.size(); ++i) {
    op.list_lengths.push_back(
        stack[i].isTensorList() ? static_cast<int>(stack[i].toTensorList().size()) : -1);
    stack[i] = map_tensors(
        stack[i], [&](const at::Tensor& result) { return capture_result(call, op, result); });
  }
  torch::jit::drop(stack, written);
  spread_history(op);
  host_data_.settle_read(op, call, *capture_, location_);
  const bool may_be_filled = host_data_.has_unread_view(capture_->graph(), op);
  capture_->add(std::move(op), may_be_filled);
}

/// Adds the value of one result and returns the tensor that the user's code gets.
at::Tensor Tracer::capture_result(const TracedCall& call, Operator& op, const at::Tensor& result) {
  if (result.defined() && result.layout() != at::kStrided) {
    location_.refuse(
        "operator " + op.name() + " returns a tensor that is not dense",
        "Convert it with to_dense(), or make the module that uses it a leaf: smp::leaf(module)(x)");
  }
  const ValueId id = capture_->add_result(call, op, result);
  if (id == kUndefined) return result;
  if (host_may_write(op.handle)) {
    give_factory_result(op, id, result);
    return result;
  }
  const int is_argument = op.result_is_argument.back();
  if (is_argument >= 0) check_shape(call, call.tensors[is_argument], result, location_);
  const at::Tensor tensor = stand_in(call, id, is_argument);
  capture_->set_user(id, tensor);
  return tensor;
}

/// The tensor that the function gets for a result: a placeholder, or its own argument.
at::Tensor Tracer::stand_in(const TracedCall& call, ValueId id, int is_argument) {
  const TensorMeta& meta = value(id).meta;
  const at::Tensor tensor =
      is_argument >= 0 ? call.tensors[is_argument] : make_placeholder(meta, options_.step_name);
  if (is_argument >= 0) histories_.follow(tensor, meta);
  known_.bind(tensor, id);
  return tensor;
}

/// A history that an operator gives to memory holds wherever the memory is seen: the function's
/// other views of it require a gradient from now on.
void Tracer::spread_history(const Operator& op) {
  if (!histories_.take_begun()) return;
  for (const auto& [tensor, id] : known_.alive()) {
    const int set = value(id).alias_set;
    const bool written = std::find(op.writes.begin(), op.writes.end(), set) != op.writes.end();
    if (!written || tensor.requires_grad() || !run_graph().requires_grad(id)) continue;
    histories_.spread_to(tensor);
    known_.bind(tensor, id);
  }
}

/// A factory's result, which host code may be about to fill, is the function's itself.
void Tracer::give_factory_result(const Operator& op, ValueId id, const at::Tensor& result) {
  if (options_.wholes != nullptr) options_.wholes->add(result.storage());
  host_data_.add_factory(value(id).alias_set, id, op.handle, result);
  known_.bind(result, id);
}

ValueId Tracer::lookup(const at::Tensor& tensor) {
  if (!tensor.defined()) return kUndefined;
  if (histories_.has_custom_functions()) histories_.check_not_custom(tensor);
  if (const auto* known = known_.find(tensor)) {
    if (tensor.requires_grad() == known->requires_grad) return known->id;
    check_changed_by_hand(tensor, location_);
    return require_grad(tensor, tensor_for(known->id));
  }
  if (const auto* entry = options_.tensors().find(tensor)) return define_from_table(*entry);
  if (tensor.requires_grad() && tensor.is_leaf()) {  // `torch::zeros(sizes, requires_grad)`
    const at::Tensor as_made = tensor.detach();
    if (find_alias(as_made) != kUndefined) return require_grad(tensor, as_made);
  }
  const ValueId alias = find_alias(tensor);
  return alias != kUndefined ? alias : define_constant(tensor);
}

/// A tensor made without an operator call on storage that is known: a shallow copy, as
/// `torch::zeros` returns one, `tensor.data()`, or a view of a parameter or buffer made outside.
ValueId Tracer::find_alias(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.requires_grad()) return kUndefined;
  const auto* on_storage = known_.find_on_storage(tensor);
  // `torch::tensor` copies shallowly and lets the original go.
  if (on_storage != nullptr && on_storage->offset == tensor.storage_offset() &&
      value(on_storage->id).meta == TensorMeta::of(tensor)) {
    const ValueId id = on_storage->id;
    known_.bind(tensor, id);
    return id;
  }
  if (on_storage != nullptr) {
    const at::Tensor other = known_.find_shallow_copy(tensor);
    if (other.defined()) return derive(tensor, "aten::detach", {other});
  }
  const auto* entry = options_.tensors().find_storage(tensor);
  if (entry != nullptr && entry->tensor.scalar_type() == tensor.scalar_type()) {
    const at::NoGradGuard no_grad;
    return derive(tensor, "aten::as_strided",
                  {entry->tensor, tensor.sizes(), tensor.strides(), tensor.storage_offset()});
  }
  if (on_storage == nullptr && entry == nullptr) return kUndefined;
  location_.refuse(
      "uses a tensor that shares memory with another one of the step but was not made from it by "
      "an operator (tensor.data() of a view, set_data, from_blob)",
      "Make it with an operator, such as detach() or as_strided()");
}

/// Takes `tensor` for the operator's result from known tensors.
ValueId Tracer::derive(const at::Tensor& tensor, const char* name, torch::jit::Stack arguments) {
  const UninterceptedScope own;
  call(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), arguments);
  const ValueId id = lookup(arguments[0].toTensor());
  known_.bind(tensor, id);
  run_graph().set_user(id, tensor);
  return id;
}

/// From now on the function's tensor is the result of `smp::requires_grad` for the old one.
ValueId Tracer::require_grad(const at::Tensor& tensor, const at::Tensor& as_before) {
  const bool on = tensor.requires_grad();
  if (on) histories_.keep_end(tensor);
  return derive(tensor, "smp::requires_grad", {as_before, on});
}

ValueId Tracer::define_from_table(const TensorTable::Entry& entry) {
  check_registered(entry, location_);
  if (entry.tensor.requires_grad() && entry.tensor.is_leaf()) histories_.keep_end(entry.tensor);
  Value value;
  value.kind = entry.kind;
  value.name = entry.name;
  value.meta = TensorMeta::of(entry.tensor);
  return add_value(std::move(value), entry.tensor);
}

ValueId Tracer::define_constant(const at::Tensor& tensor) {
  check_constant(tensor, reading_, /*is_new=*/capture_ != nullptr, options_, location_);
  Value value;
  value.kind = ValueKind::kConstant;
  value.meta = TensorMeta::of(tensor);
  value.content = guard_ != nullptr ? tensor : clone_content(tensor);
  constexpr int64_t kLargeBytes = 1 << 20;
  if (capture_ != nullptr && value.meta.nbytes() > kLargeBytes) {
    TORCH_WARN(core::error_prefix(), "step function \"", options_.step_name, "\" uses a tensor of ",
               value.meta.nbytes() / kLargeBytes,
               " MiB that is neither an input nor a parameter or buffer. It is kept as a constant "
               "of the graph; register it as a buffer if it belongs to the model");
  }
  return add_value(std::move(value), tensor);
}

/// Adds a value that no operator made; `tensor` is the one that the user's code holds.
ValueId Tracer::add_value(Value value, const at::Tensor& tensor) {
  ValueId id;
  if (guard_ != nullptr) {
    id = guard_->add(std::move(value));
  } else {
    const auto* on_storage = known_.find_on_storage(tensor);
    if (on_storage != nullptr) value.alias_set = this->value(on_storage->id).alias_set;
    id = capture_->add(value, tensor);
    if (value.kind == ValueKind::kConstant) host_data_.add_constants({{id, tensor}}, *capture_);
  }
  known_.bind(tensor, id);
  return id;
}

/// A tensor that is known for the value: the function may have let its own go.
at::Tensor Tracer::tensor_for(ValueId id) {
  const at::Tensor tensor = make_placeholder(value(id).meta, options_.step_name);
  known_.bind(tensor, id);
  return tensor;
}

void Tracer::backward(const std::vector<at::Tensor>& tensors,
                      const std::vector<at::Tensor>& gradients) {
  SMP_CHECK_WITH(UsageError, intercepting(), location_.to_string(),
                 ": backward was called inside a leaf module. Call model->backward in the step "
                 "function, on what the leaf returns");
  const UninterceptedScope own;
  const ExecutionMode mode = this->mode();
  SMP_CHECK_WITH(UsageError, roots_.empty() || mode.runs_like(roots_.front().mode),
                 location_.to_string(),
                 ": backward was called in another mode than before, and the pipeline runs all "
                 "backwards of a step together. Call it each time in the same, for example outside "
                 "of autocast");
  SMP_CHECK_WITH(UsageError, gradients.empty() || gradients.size() == tensors.size(),
                 location_.to_string(), ": backward got ", tensors.size(), " tensors and ",
                 gradients.size(), " gradients; give one gradient for each tensor, or none");
  for (size_t i = 0; i < tensors.size(); ++i) {
    BackwardRoot root;
    root.mode = mode;
    root.value = lookup(tensors[i]);
    if (!gradients.empty()) {
      root.gradient = lookup(gradients[i]);
      settle_end(root.gradient);
    }
    // The operators' own tensors know best: a view of the tensor may have been written. Where the
    // run follows a known graph, that one was checked.
    const bool differentiable =
        root.value != kUndefined &&
        (guard_ != nullptr || capture_->concrete(root.value).requires_grad());
    SMP_CHECK_WITH(UsageError, differentiable, location_.to_string(),
                   ": backward was called on a tensor that does not depend on a parameter that "
                   "requires a gradient (or gradients are off: is a NoGradGuard alive?)");
    SMP_CHECK_WITH(UsageError, root.gradient != kUndefined || tensors[i].numel() == 1,
                   location_.to_string(), ": backward was called on a tensor of shape ",
                   tensors[i].sizes(),
                   " without a gradient; reduce it to a scalar (loss.mean()) or give its gradient");
    roots_.push_back(root);
  }
  root_tensors_.insert(root_tensors_.end(), tensors.begin(), tensors.end());
  root_tensors_.insert(root_tensors_.end(), gradients.begin(), gradients.end());
  ++backwards_;
}

/// The function returns the value or gives it as a gradient, which reads it.
void Tracer::settle_end(ValueId id) {
  if (id == kUndefined) return;
  const HostMemory* memory = host_data_.find(value(id).alias_set);
  if (memory == nullptr) return;
  const ValueId factory = memory->id;
  const bool leaves = guard_ != nullptr && memory->filled(/*for_read=*/true) &&
                      !guard_->leave_unless_literal(factory);
  if (leaves) start_capture(c10::str("host code has filled %", factory));
  host_data_.settle_read(id, run_graph(), location_);
}

/// The program's backward pass was over when it called the operator. So the tensor on which
/// `backward` was called, and the gradient it got, are copied before the operator writes them.
void Tracer::keep_roots(const TracedCall& call) {
  for (ValueId written : call.written()) {
    for (BackwardRoot& root : roots_) {
      if (share_storage(root.value, written)) root.value = keep_root(root.value, true);
      if (share_storage(root.gradient, written)) root.gradient = keep_root(root.gradient, false);
    }
  }
}

bool Tracer::share_storage(ValueId a, ValueId b) const {
  if (a == kUndefined || b == kUndefined) return false;
  // A value first seen in this call has no alias set yet while guarding.
  return a == b || (value(a).alias_set >= 0 && value(a).alias_set == value(b).alias_set);
}

ValueId Tracer::keep_root(ValueId root, bool with_history) {
  const at::Tensor tensor = tensor_for(root);
  const c10::InferenceMode normal(false);
  const at::AutoGradMode mode(with_history);
  return derive(tensor, "aten::clone", {tensor, c10::IValue()});
}

/// The tensor whose gradient goes by an edge; undefined if the function has not used it.
at::Tensor Tracer::end_of(const torch::autograd::Edge& edge) {
  if (edge.function.get() == &placeholder_history())
    return tensor_for(static_cast<ValueId>(edge.input_nr));
  const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
  return leaf == nullptr ? at::Tensor() : leaf->variable;
}

/// `autograd::grad` is an operator of the graph. Its inputs that no operator has read have no end.
std::optional<torch::autograd::variable_list> Tracer::differentiate(const BackwardPass& pass) {
  if (pass.accumulate) {
    core::fail<UsageError>(
        location_.to_string(),
        ": backward() was called inside it, which would add to the gradients of one microbatch. "
        "The step runs the pipeline's backward pass itself: call model->backward(loss) instead, or "
        "torch::autograd::grad for gradients that the function goes on to use");
  }
  SMP_CHECK_WITH(UsageError, backwards_ == 0, location_.to_string(),
                 ": autograd::grad was called after backward, which is the end of the history. "
                 "Call it before model->backward");
  const UninterceptedScope own;
  std::vector<at::Tensor> outputs, inputs;
  for (const auto& edge : pass.roots) outputs.push_back(end_of(edge));
  std::vector<size_t> known;
  for (size_t i = 0; i < pass.inputs.size(); ++i) {
    const at::Tensor input = end_of(pass.inputs[i]);
    if (!input.defined()) continue;
    known.push_back(i);
    inputs.push_back(input);
  }
  torch::jit::Stack stack{outputs, pass.gradients, inputs, pass.keep_graph, pass.create_graph};
  call(grad_operator(), stack);
  const std::vector<at::Tensor> results = stack[0].toTensorVector();
  torch::autograd::variable_list gradients(pass.inputs.size());
  for (size_t i = 0; i < known.size(); ++i) gradients[known[i]] = results[i];
  return gradients;
}

void Tracer::custom_function() { histories_.note_custom_function(); }

void Tracer::retain_grad() {
  location_.refuse(
      "calls retain_grad() on a tensor, whose gradient would not be kept",
      "Gradients of parameters are complete when the step has returned. For that of another "
      "tensor, add a parameter of zeros to it");
}

}  // namespace smp::graph
