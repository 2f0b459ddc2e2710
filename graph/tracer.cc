// SPDX-License-Identifier: Apache-2.0
#include "graph/tracer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "core/check.h"
#include "graph/capture.h"
#include "graph/content.h"
#include "graph/engine.h"
#include "graph/guard.h"
#include "graph/leaf.h"
#include "graph/module_scope.h"
#include "graph/not_equal.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"
#include "graph/stack_tensors.h"
#include "graph/written_results.h"

namespace smp::graph {
namespace {

thread_local Tracer* active = nullptr;

/// While it lives, tensors have no history: a leaf works on the buffers of its module themselves.
class WithoutHistories {
 public:
  explicit WithoutHistories(const std::vector<at::Tensor>& tensors) : tensors_(tensors) {
    for (const at::Tensor& tensor : tensors_) {
      edges_.push_back(torch::autograd::impl::gradient_edge(tensor));
      torch::autograd::impl::set_gradient_edge(tensor, torch::autograd::Edge());
    }
  }
  ~WithoutHistories() {
    for (size_t i = tensors_.size(); i-- > 0;) {  // one may be there twice
      torch::autograd::impl::set_gradient_edge(tensors_[i], edges_[i]);
    }
  }
  WithoutHistories(const WithoutHistories&) = delete;
  WithoutHistories& operator=(const WithoutHistories&) = delete;

 private:
  const std::vector<at::Tensor> tensors_;
  std::vector<torch::autograd::Edge> edges_;
};

/// The storages that are held by `outputs` and by the step's result, which has each of them once,
/// and by nothing else.
std::unordered_set<const c10::StorageImpl*> only_returned(const std::vector<at::Tensor>& outputs) {
  std::unordered_map<const c10::TensorImpl*, size_t> times;
  for (const at::Tensor& output : outputs) ++times[output.unsafeGetTensorImpl()];
  std::unordered_set<const c10::StorageImpl*> storages;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.has_storage()) continue;
    const c10::Storage& storage = output.storage();
    const bool one_tensor = storage.use_count() == 1;
    const bool one_holder = output.use_count() <= 2 * times.at(output.unsafeGetTensorImpl());
    if (one_tensor && one_holder) storages.insert(storage.unsafeGetStorageImpl());
  }
  return storages;
}

}  // namespace

Tracer* Tracer::current() { return active; }

Tracer::Tracer(TraceOptions options) : options_(std::move(options)) {}
Tracer::~Tracer() = default;

TraceResult Tracer::run(const std::vector<at::Tensor>& inputs, const Function& function) {
  SMP_INTERNAL_ASSERT(!options_.execute || options_.candidates.empty(),
                      "a run that executes is compared with no other");
  history_ = &placeholder_history();
  history_->tensor_pre_hooks().clear();  // an earlier run may have ended with an error
  std::vector<at::Tensor> passed;
  define_inputs(inputs, passed);
  install_engine();
  active = this;
  const auto ended = c10::make_scope_exit([this] {
    end_histories();
    active = nullptr;
  });
  const std::vector<at::Tensor> outputs = run_function(function, passed);
  passed.clear();  // tensors that are still there now are held elsewhere
  return finish(outputs);
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
    refuse_torch_script();  // its interpreter throws errors of its own, which are these ...
    core::fail<Error>(where(), ": ", core::text_without_prefix(error));
  } catch (const std::exception&) {
    refuse_torch_script();  // ... or, before libtorch 2.15, std::runtime_error
    throw;
  }
}

// ---------------------------------------------------------------------------------------------
// One operator call

/// The name in the model of the module that code on this thread says is running.
std::string Tracer::module_path(const RunningModule& module) const {
  const auto* entry = options_.table == nullptr || !module.parameter.defined()
                          ? nullptr
                          : options_.table->find(module.parameter);
  if (entry == nullptr) return module.path;
  std::vector<std::string> names = entry->aliases;
  names.insert(names.begin(), entry->name);
  for (const std::string& name : names) {
    const size_t prefix = name.size() - std::min(name.size(), module.parameter_name.size());
    if (name.compare(prefix, std::string::npos, module.parameter_name) != 0) continue;
    if (prefix == 0) return module.path;
    if (name[prefix - 1] != '.') continue;
    return module.path.empty() ? name.substr(0, prefix - 1) : name.substr(0, prefix) + module.path;
  }
  return module.path;
}

void Tracer::note_module(size_t index) {
  if (running_module() == nullptr) return;
  if (modules_known_.size() <= index) modules_known_.resize(index + 1);
  modules_known_[index] = true;
}

std::string Tracer::last_scope() const {
  if (const RunningModule* module = running_module()) return module_path(*module);
  if (last_parameter_ == kUndefined) return "";
  const std::string& name = value(last_parameter_).name;
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

std::string Tracer::where() const {
  std::string text = "step function \"" + options_.step_name + "\"";
  const std::string module = last_scope();
  if (!module.empty()) text += ", in or after module \"" + module + "\"";
  return text;
}

void Tracer::refuse(const std::string& what, const std::string& remedy) const {
  core::fail<CaptureError>(where(), ": ", what, ". ", remedy, ".");
}

ExecutionMode Tracer::mode() const {
  ExecutionMode mode = ExecutionMode::current();
  mode.after_backward = backwards_;
  return mode;
}

void Tracer::call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  check_hooks();
  if (torch::jit::in_torchscript_runtime()) {
    script_operator_ = op.schema().name();
    refuse_torch_script();
  }
  // An operator of the known graph does not answer the host.
  const bool expected = guard_ != nullptr && guard_->expects(op);
  if (!expected && answer_host_value(op, stack)) return;
  // Taken while it is in use: a call may derive a value with a call of its own.
  TracedCall current = std::move(spare_call_);
  collect(op, stack, current);
  if (!roots_.empty()) keep_roots(current);
  if (guard_ == nullptr || !guard(current, stack)) {
    refuse_unsupported(current);
    capture(current, stack);
  }
  current.clear();
  spare_call_ = std::move(current);
}

/// Whether the call is one of a known graph; it gets the results captured there.
bool Tracer::guard(const TracedCall& call, torch::jit::Stack& stack) {
  const auto filled = [&](const Graph& graph, const Operator& op) {
    return filled_by_host(graph, call, op);
  };
  if (auto difference = guard_->compare(call, mode(), filled)) {
    start_capture(*std::move(difference));
    return false;
  }
  const auto constants = guard_->added_constants();
  note_module(guard_->size());
  const Operator& op = guard_->advance();
  settle_written(op);
  settle_read(call, op);
  for (const auto& [id, tensor] : constants) note_constant(id, tensor);
  push_captured_results(call, op, stack);
  spread_history(op);
  return true;
}

/// From here on the run is another one than the known graphs.
void Tracer::start_capture(std::string difference) {
  difference_ = std::move(difference);
  const auto constants = guard_->added_constants();
  capture_ = make_capture(guard_->prefix());
  guard_.reset();
  for (const auto& [id, tensor] : constants) note_constant(id, tensor);
}

std::unique_ptr<Capture> Tracer::make_capture(Graph prefix) const {
  const auto refuse = [this](const std::string& what, const std::string& remedy) {
    this->refuse(what, remedy);
  };
  return std::make_unique<Capture>(options_, refuse, std::move(prefix));
}

void Tracer::capture(const TracedCall& call, torch::jit::Stack& stack) {
  Operator op = capture_->make_operator(call, mode(), last_scope());
  note_module(capture_->graph().operators.size());
  check_writes(op);
  settle_written(op);
  {
    const WithoutHistories scope(is_leaf(op.handle) ? histories_ : std::vector<at::Tensor>());
    capture_->run(call, op, stack);
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
  settle_read(call, op);
  const bool may_be_filled = views_unread_host_data(op);
  capture_->add(std::move(op), may_be_filled);
}

void Tracer::check_writes(const Operator& op) const {
  for (int alias_set : op.writes) {
    const Value& base = capture_->base(alias_set);
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

/// Adds the value of one result and returns the tensor that the user's code gets.
at::Tensor Tracer::capture_result(const TracedCall& call, Operator& op, const at::Tensor& result) {
  if (result.defined() && result.layout() != at::kStrided) {
    refuse(
        "operator " + op.name() + " returns a tensor that is not dense",
        "Convert it with to_dense(), or make the module that uses it a leaf: smp::leaf(module)(x)");
  }
  const ValueId id = capture_->add_result(call, op, result);
  if (id == kUndefined) return result;
  if (host_may_write(op.handle)) {
    bind(result, id);
    note_factory(id, op.handle, result);
    return result;
  }
  const int is_argument = op.result_is_argument.back();
  if (is_argument >= 0) check_keeps_shape(call, call.tensors[is_argument], result);
  const at::Tensor tensor = stand_in(call, id, is_argument);
  capture_->set_user(id, tensor);
  return tensor;
}

void Tracer::push_captured_results(const TracedCall& call, const Operator& op,
                                   torch::jit::Stack& stack) {
  const Graph& graph = guard_->graph();
  const bool factory = call.tensors.empty() && host_may_write(*call.op);
  if (factory && (graph.makes_literal(op) || is_small_on_cpu(value(op.results[0]).meta))) {
    // Host code may be about to write into it, even if no operator reads it then.
    call.op->callBoxed(stack);
    const at::Tensor& result = stack.back().toTensor();
    note_factory(op.results[0], op.handle, result);
    bind(result, op.results[0]);
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

/// The tensor that the function gets for a result: a placeholder, or its own argument.
at::Tensor Tracer::stand_in(const TracedCall& call, ValueId id, int is_argument) {
  const TensorMeta& meta = value(id).meta;
  const at::Tensor tensor =
      is_argument >= 0 ? call.tensors[is_argument] : make_placeholder(meta, options_.step_name);
  if (is_argument >= 0) follow(tensor, meta);
  bind(tensor, id);
  return tensor;
}

Argument Tracer::collect_argument(const c10::IValue& value, TracedCall& call) {
  Argument argument;
  const auto add = [&](const at::Tensor& tensor) {
    const ValueId id = lookup(tensor);
    argument.values.push_back(id);
    call.ids.push_back(id);
    call.tensors.push_back(tensor);
  };
  if (value.isTensor()) {
    argument.kind = Argument::Kind::kTensor;
    add(value.toTensor());
  } else if (value.isTensorList()) {
    argument.kind = Argument::Kind::kTensorList;
    for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
  } else if (value.isOptionalTensorList()) {
    argument.kind = Argument::Kind::kOptionalTensorList;
    for (const auto& tensor : value.toOptionalTensorVector()) add(tensor.value_or(at::Tensor()));
  } else {
    argument.constant = value;
  }
  return argument;
}

void Tracer::collect(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                     TracedCall& call) {
  const size_t count = op.schema().arguments().size();
  call.op = &op;
  call.arguments.reserve(count);
  const c10::OperatorHandle* outer = std::exchange(reading_, &op);
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    call.arguments.push_back(collect_argument(stack[i], call));
  }
  reading_ = outer;
  for (ValueId id : call.ids) {
    if (id == kUndefined) continue;
    if (value(id).kind == ValueKind::kParameter) last_parameter_ = id;
  }
  if (custom_function_) watch_custom_function(call);
  make_offset_relative(call);
}

/// An input lies somewhere else in its storage in each microbatch, and a tensor that crossed
/// between ranks has a storage of its own: so an offset is captured only if it is the tensor's own,
/// as None. Parameters and buffers stay where they are.
void Tracer::make_offset_relative(TracedCall& call) const {
  const int index = storage_offset_argument(call.op->schema());
  if (index < 0 || call.ids[0] == kUndefined) return;
  c10::IValue& offset = call.arguments[index].constant;
  if (options_.table->find(call.tensors[0]) != nullptr || !offset.isInt()) return;
  call.absolute_offset = true;
  if (offset.toInt() == call.tensors[0].storage_offset()) offset = c10::IValue();
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

/// Handles operators with results that are no tensors; false if all results are tensors.
bool Tracer::answer_host_value(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  if (!returns_host_value(schema)) return false;
  const std::string& name = schema.name();
  if (name == "aten::equal") {
    const at::Tensor& a = stack[stack.size() - 2].toTensor();
    const at::Tensor& b = stack[stack.size() - 1].toTensor();
    const bool same = a.is_same(b);
    if (same || a.sizes() != b.sizes() || differ(a, b)) {
      torch::jit::drop(stack, 2);
      stack.push_back(same);
      return true;
    }
  } else if (has_trait(name, OperatorTrait::kReadsMetadata) || !has_tensor_argument(schema) ||
             is_host_data(stack, schema.arguments().size())) {
    op.callBoxed(stack);
    return true;
  }
  refuse_replaced_storage(name);
  for (const at::Tensor& read : tensors_in(stack, schema.arguments().size())) {
    refuse_cumulative_average(read);
  }
  refuse("operator " + name + " reads the data of a tensor on the host",
         "A step is captured as a graph of operators, so what it does cannot depend on data. Use "
         "tensor operators instead (torch::where, masks), return the tensor from the step and read "
         "it there, or make the module that needs the value a leaf: smp::leaf(module)(x)");
}

/// Whether the program itself has the data of the call's tensors: constants made outside, and
/// memory that host code may fill. It is the same for all microbatches, and the program reads it in
/// each step.
bool Tracer::is_host_data(const torch::jit::Stack& stack, size_t arguments) const {
  const std::vector<at::Tensor> tensors = tensors_in(stack, arguments);
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return !tensor.defined() ||
           (!is_placeholder(tensor) && options_.table->find_storage(tensor) == nullptr);
  });
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

// ---------------------------------------------------------------------------------------------
// The end

void Tracer::backward(const std::vector<at::Tensor>& tensors,
                      const std::vector<at::Tensor>& gradients) {
  SMP_CHECK_WITH(UsageError, intercepting(), where(),
                 ": backward was called inside a leaf module. Call model->backward in the step "
                 "function, on what the leaf returns");
  const UninterceptedScope own;
  const ExecutionMode mode = this->mode();
  SMP_CHECK_WITH(UsageError, roots_.empty() || mode.runs_like(roots_.front().mode), where(),
                 ": backward was called in another mode than before, and the pipeline runs all "
                 "backwards of a step together. Call it each time in the same, for example outside "
                 "of autocast");
  SMP_CHECK_WITH(UsageError, gradients.empty() || gradients.size() == tensors.size(), where(),
                 ": backward got ", tensors.size(), " tensors and ", gradients.size(),
                 " gradients; give one gradient for each tensor, or none");
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
    SMP_CHECK_WITH(UsageError, differentiable, where(),
                   ": backward was called on a tensor that does not depend on a parameter that "
                   "requires a gradient (or gradients are off: is a NoGradGuard alive?)");
    SMP_CHECK_WITH(UsageError, root.gradient != kUndefined || tensors[i].numel() == 1, where(),
                   ": backward was called on a tensor of shape ", tensors[i].sizes(),
                   " without a gradient; reduce it to a scalar (loss.mean()) or give its gradient");
    roots_.push_back(root);
  }
  root_tensors_.insert(root_tensors_.end(), tensors.begin(), tensors.end());
  root_tensors_.insert(root_tensors_.end(), gradients.begin(), gradients.end());
  ++backwards_;
}

/// Lets go of the function's tensors at the end: the tracer no longer counts among those that hold
/// them.
void Tracer::let_go() {
  capture_.reset();
  host_data_.clear();
  inner_arguments_.clear();
  root_tensors_.clear();
  ends_.clear();
}

/// Call it after `let_go`.
std::vector<ValueId> Tracer::left_behind(const std::vector<at::Tensor>& outputs) const {
  const auto returned = only_returned(outputs);
  std::vector<ValueId> left;
  storages_.for_each_alive([&](const auto& storage, const OnStorage& known) {
    if (is_placeholder(*storage) && returned.count(storage.get()) == 0) left.push_back(known.id);
    return true;
  });
  return left;
}

TraceResult Tracer::finish(const std::vector<at::Tensor>& outputs) {
  check_hooks();
  for (const at::Tensor& tensor : inner_arguments_) check_history(tensor);
  for (const at::Tensor& output : outputs) {
    outputs_.push_back(lookup(output));
    settle_end(outputs_.back());
  }
  for (const auto& [alias_set, data] : host_data_) {
    if (data.is_read && !is_small_on_cpu(TensorMeta::of(data.tensor))) check_unchanged(data);
  }
  if (guard_ != nullptr) {
    if (auto match = guard_->match(outputs_, roots_)) return *std::move(match);
    start_capture(c10::str("the function ends after ", guard_->size(),
                           " operators, or returns or differentiates other tensors"));
  }
  TraceResult result;
  result.recorded = capture_->finish(outputs_, roots_, modules_known_);
  result.difference = difference_;
  result.checksums = capture_->checksums();
  result.kept = capture_->live_results();
  let_go();
  result.left = left_behind(outputs);
  return result;
}

}  // namespace smp::graph
