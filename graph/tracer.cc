#include "graph/tracer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>

#include "graph/content.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"
#include "smp/core/error.h"

namespace smp::graph {
namespace {

thread_local Tracer* active = nullptr;

class ActiveScope {
 public:
  explicit ActiveScope(Tracer* tracer) { active = tracer; }
  ~ActiveScope() { active = nullptr; }
};

bool has_hooks(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || meta->cpp_hooks_list_ == nullptr) return false;
  const auto& hooks = *meta->cpp_hooks_list_;  // one that was removed is empty
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) { return hook != nullptr; });
}

/// The name of the custom function that a node of the autograd graph calls; empty for other nodes.
std::string custom_function_of(const torch::autograd::Node& node) {
  constexpr std::string_view kWrapper = "torch::autograd::CppNode<";
  const std::string name = node.name();
  if (name.compare(0, kWrapper.size(), kWrapper) != 0) return "";
  return name.substr(kWrapper.size(), name.size() - kWrapper.size() - 1);
}

/// True if the two hold some of the same bytes.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!a.has_storage() || !b.has_storage() || a.device() != b.device()) return false;
  // Without checks: what another rank owns has no data here, and overlaps nothing.
  const auto range = [](const at::Tensor& tensor) {
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    const auto* begin = static_cast<const char*>(storage._mutable_data_ptr_no_checks().get());
    return std::pair(begin, begin + storage.nbytes());
  };
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

}  // namespace

Tracer* Tracer::current() { return active; }

Tracer::Tracer(TraceOptions options) : options_(std::move(options)) {}
Tracer::~Tracer() = default;

TraceResult Tracer::run(const std::vector<at::Tensor>& inputs, const Function& function) {
  SMP_INTERNAL_ASSERT(!options_.execute || options_.candidates.empty(),
                      "a run that executes is compared with no other");
  history_ = &placeholder_history(options_.step_name);
  history_->tensor_pre_hooks().clear();  // an earlier run may have ended with an error
  std::vector<at::Tensor> passed;
  define_inputs(inputs, passed);
  ActiveScope scope(this);
  std::vector<at::Tensor> outputs;
  {
    InterceptScope intercept(*this);
    outputs = function(passed);
  }
  return finish(outputs);
}

// ---------------------------------------------------------------------------------------------
// Values

const Value& Tracer::value(ValueId id) const {
  if (!verifying()) return graph_->values[id];
  if (id < value_count_) return live_[0].graph->values[id];
  return pending_[id - value_count_];
}

void Tracer::define_inputs(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& passed) {
  std::vector<Value> values;
  for (size_t i = 0; i < inputs.size(); ++i) {
    SMP_CHECK_WITH(CaptureError, !inputs[i].requires_grad(), "step function \"", options_.step_name,
                   "\": input ", i,
                   " requires a gradient; a step trains the parameters of its models only. Pass "
                   "input.detach()");
    Value value;
    value.kind = ValueKind::kInput;
    value.name = std::to_string(i);
    value.meta = TensorMeta::of(inputs[i]);
    values.push_back(std::move(value));
    passed.push_back(make_placeholder(values.back().meta, options_.step_name));
  }
  for (const Graph* candidate : options_.candidates) {
    bool fits = candidate->inputs.size() == values.size();
    for (size_t i = 0; fits && i < values.size(); ++i) {
      fits = candidate->values[i].meta == values[i].meta;
    }
    if (fits) live_.push_back({candidate, {}, {}});
  }
  if (!options_.candidates.empty() && live_.empty()) difference_ = "the inputs' shapes or types";
  if (verifying()) {
    known_.reserve(live_[0].graph->values.size());
    storages_.reserve(live_[0].graph->alias_sets);
    value_count_ = static_cast<ValueId>(values.size());
    for (size_t i = 0; i < passed.size(); ++i) bind(passed[i], static_cast<ValueId>(i));
    return;
  }
  graph_ = std::make_unique<Graph>();
  for (size_t i = 0; i < passed.size(); ++i) {
    const ValueId id = add_value(std::move(values[i]), passed[i]);
    if (options_.execute) concrete_[id].tensor = inputs[i];
  }
}

void Tracer::bind(const at::Tensor& tensor, ValueId id) {
  auto weak = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
  known_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                          Known{id, tensor.requires_grad(), std::move(weak)});
  if (!tensor.has_storage()) return;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const auto it = storages_.find(storage);
  if (it != storages_.end()) {
    it->second.id = id;
    it->second.offset = tensor.storage_offset();
    return;
  }
  const int alias_set = verifying() ? -1 : value(id).alias_set;
  storages_.emplace(storage, StorageInfo{id, tensor.storage_offset(), alias_set,
                                         c10::weak_intrusive_ptr<c10::StorageImpl>(
                                             tensor.storage().getWeakStorageImpl())});
}

/// Adds a value that no operator made; `tensor` is what the user's code holds.
ValueId Tracer::add_value(Value value, const at::Tensor& tensor) {
  ValueId id;
  if (verifying()) {
    id = value_count_ + static_cast<ValueId>(pending_.size());
    pending_.push_back(std::move(value));
  } else {
    id = static_cast<ValueId>(graph_->values.size());
    value.alias_set = alias_set_of(tensor);
    first_aliases_.emplace(value.alias_set, id);
    graph_->values.push_back(std::move(value));
    concrete_.resize(graph_->values.size());
    // Operators give a buffer that they write a history, which ends with the step.
    const bool buffer = graph_->values[id].kind == ValueKind::kBuffer;
    if (options_.execute) concrete_[id].tensor = buffer ? tensor.variable_data() : tensor;
  }
  bind(tensor, id);
  return id;
}

int Tracer::alias_set_of(const at::Tensor& tensor) {
  if (tensor.has_storage()) {
    const auto it = storages_.find(tensor.storage().unsafeGetStorageImpl());
    if (it != storages_.end() && it->second.alias_set >= 0) return it->second.alias_set;
  }
  return graph_->alias_sets++;
}

ValueId Tracer::lookup(const at::Tensor& tensor) {
  if (!tensor.defined()) return kUndefined;
  if (custom_function_) check_history(tensor);
  const auto it = known_.find(tensor.unsafeGetTensorImpl());
  if (it != known_.end()) {
    check_requires_grad(tensor, it->second);
    return it->second.id;
  }
  if (const auto* entry = options_.table->find(tensor)) return define_from_table(*entry);
  const ValueId alias = find_alias(tensor);
  return alias != kUndefined ? alias : define_constant(tensor);
}

/// A tensor that is known and shows the same elements.
at::Tensor Tracer::find_shallow_copy(const at::Tensor& tensor) const {
  for (const auto& [impl, known] : known_) {
    const auto owner = known.keep.lock();
    if (!owner) continue;
    const at::Tensor other{owner};
    if (other.has_storage() &&
        other.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl() &&
        other.sizes() == tensor.sizes() && other.strides() == tensor.strides() &&
        other.storage_offset() == tensor.storage_offset() &&
        other.scalar_type() == tensor.scalar_type()) {
      return other;
    }
  }
  return at::Tensor();
}

/// A tensor made without an operator call on storage that is known: a shallow copy, as
/// `torch::zeros` returns one, `tensor.data()`, or a view of a parameter or buffer made outside.
ValueId Tracer::find_alias(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.requires_grad()) return kUndefined;
  const auto storage = storages_.find(tensor.storage().unsafeGetStorageImpl());
  const bool known_storage = storage != storages_.end();
  // `torch::tensor` copies shallowly and lets the original go.
  if (known_storage && storage->second.offset == tensor.storage_offset() &&
      value(storage->second.id).meta == TensorMeta::of(tensor)) {
    const ValueId id = storage->second.id;
    bind(tensor, id);
    return id;
  }
  if (const at::Tensor other = known_storage ? find_shallow_copy(tensor) : at::Tensor();
      other.defined()) {
    return derive(tensor, "aten::detach", {other});
  }
  const auto* entry = options_.table->find_storage(tensor);
  if (entry != nullptr && entry->tensor.scalar_type() == tensor.scalar_type()) {
    const at::NoGradGuard no_grad;
    return derive(tensor, "aten::as_strided",
                  {entry->tensor, tensor.sizes(), tensor.strides(), tensor.storage_offset()});
  }
  if (!known_storage && entry == nullptr) return kUndefined;
  refuse(
      "uses a tensor that shares memory with another one of the step but was not made from it by "
      "an operator (tensor.data() of a view, set_data, from_blob)",
      "Make it with an operator, such as detach() or as_strided()");
}

/// Takes `tensor` for what the operator makes of known tensors.
ValueId Tracer::derive(const at::Tensor& tensor, const char* name, torch::jit::Stack arguments) {
  const UninterceptedScope own;
  call(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), arguments);
  const ValueId id = lookup(arguments[0].toTensor());
  bind(tensor, id);
  return id;
}

ValueId Tracer::define_from_table(const TensorTable::Entry& entry) {
  if (has_hooks(entry.tensor)) {
    refuse("uses " + std::string(graph::to_string(entry.kind)) + " \"" + entry.name +
               "\", which has a hook (register_hook) that would not run",
           "Gradients are complete when the step has returned: change them there, before "
           "optimizer.step()");
  }
  Value value;
  value.kind = entry.kind;
  value.name = entry.name;
  value.meta = TensorMeta::of(entry.tensor);
  return add_value(std::move(value), entry.tensor);
}

ValueId Tracer::define_constant(const at::Tensor& tensor) {
  if (is_placeholder(tensor)) {
    refuse("uses a tensor that escaped from an earlier run of a step function",
           "Return what the next step needs from the step, and pass it in as an argument");
  }
  if (tensor.requires_grad() && !tensor.is_leaf()) {
    refuse(
        "uses a tensor with a gradient history that was computed outside the step function (or on "
        "another thread)",
        "Compute it inside the step function on the calling thread, or pass tensor.detach()");
  }
  if (tensor.requires_grad()) {
    refuse(c10::str("uses a parameter of shape ", tensor.sizes(),
                    " that belongs to no DistributedModel"),
           "Register it in a module (register_parameter, register_module), assign it to the member "
           "before that, and wrap the module in a DistributedModel");
  }
  for (const auto& entry : options_.table->entries()) {
    if (entry.tensor.grad().is_same(tensor)) {
      refuse("reads the gradient of parameter \"" + entry.name + "\"",
             "Gradients are complete when the step has returned: read them there");
    }
    if (!verifying() && overlap(entry.tensor, tensor)) {
      refuse("uses a tensor that shares memory with " + std::string(graph::to_string(entry.kind)) +
                 " \"" + entry.name + "\" but was not made from it by an operator (from_blob)",
             "Make it with an operator, such as detach() or as_strided()");
    }
  }
  Value value;
  value.kind = ValueKind::kConstant;
  value.meta = TensorMeta::of(tensor);
  value.content = verifying() ? tensor : clone_content(tensor);
  constexpr int64_t kLargeBytes = 1 << 20;
  if (!verifying() && value.meta.nbytes() > kLargeBytes) {
    TORCH_WARN(error_prefix(), "step function \"", options_.step_name, "\" uses a tensor of ",
               value.meta.nbytes() / kLargeBytes,
               " MiB that is neither an input nor a parameter or buffer. It is kept as a constant "
               "of the graph; register it as a buffer if it belongs to the model");
  }
  return add_value(std::move(value), tensor);
}

/// Hooks on gradients of tensors leave no operator behind; those that the function registered are
/// in the history that all of its tensors share.
void Tracer::check_hooks() const {
  if (history_->tensor_pre_hooks().empty()) return;
  history_->tensor_pre_hooks().clear();
  refuse("registers a hook on a tensor (register_hook), which is no operator and would not run",
         "Gradients of parameters are complete when the step has returned: read or change them "
         "there, or make the module that needs the hook a leaf: smp::leaf(module)(x)");
}

/// `requires_grad_()` and what gives a tensor a history by hand are no operators.
void Tracer::check_requires_grad(const at::Tensor& tensor, const Known& known) const {
  if (tensor.requires_grad() == known.requires_grad) return;
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta != nullptr && meta->grad_fn_ != nullptr) {
    refuse(
        "uses a tensor that got a gradient history from no operator (" + meta->grad_fn_->name() +
            ")",
        "Write what made it with differentiable tensor operators, or make the module that makes it "
        "a leaf: smp::leaf(module)(x)");
  }
  refuse(c10::str("changes a tensor of shape ", tensor.sizes(), " by requires_grad_(",
                  tensor.requires_grad() ? "true" : "false", "), which is no operator"),
         "Freeze and unfreeze parameters before the step; a step differentiates with respect to "
         "parameters only, and detach() gives a tensor that requires no gradient");
}

/// A custom autograd function is not an operator: its forward's operators are seen, with gradients
/// off, its backward is not.
void Tracer::check_history(const at::Tensor& tensor) const {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || meta->grad_fn_ == nullptr) return;
  const std::string function = custom_function_of(*meta->grad_fn_);
  if (function.empty()) return;
  refuse("uses the result of the custom autograd function " + function +
             ", whose backward cannot be captured",
         "Write the function with differentiable tensor operators, or make the module that applies "
         "it a leaf: smp::leaf(module)(x)");
}

void Tracer::custom_function() { custom_function_ |= at::GradMode::is_enabled(); }

void Tracer::retain_grad() {
  refuse("calls retain_grad() on a tensor, whose gradient would not be kept",
         "Gradients of parameters are complete when the step has returned. For that of another "
         "tensor, add a parameter of zeros to it");
}

// ---------------------------------------------------------------------------------------------
// One operator call

std::string Tracer::last_scope() const {
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
  detail::fail<CaptureError>(where(), ": ", what, ". ", remedy, ".");
}

void Tracer::Call::clear() {
  arguments.clear();
  tensors.clear();
  ids.clear();
  absolute_offset = false;
}

void Tracer::call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  SMP_CHECK_WITH(UsageError, torch::autograd::get_current_graph_task_id() == -1, where(),
                 ": backward() or autograd::grad was called inside it. The step runs the pipeline's "
                 "backward pass itself: call model->backward(loss) instead");
  check_hooks();
  // What was recorded as an operator is none that answers the host.
  if (!is_expected(op) && answer_host_value(op, stack)) return;
  // Taken while it is in use: a call may derive a value with a call of its own.
  Call current = std::move(spare_call_);
  collect(op, stack, current);
  if (!verifying() || !verify(current, stack)) {
    refuse_unsupported(current);
    record(current, stack);
  }
  current.clear();
  spare_call_ = std::move(current);
}

Argument Tracer::collect_argument(const c10::IValue& value, Call& call) {
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

void Tracer::collect(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Call& call) {
  const size_t count = op.schema().arguments().size();
  call.op = &op;
  call.arguments.reserve(count);
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    call.arguments.push_back(collect_argument(stack[i], call));
  }
  for (ValueId id : call.ids) {
    if (id == kUndefined) continue;
    if (value(id).kind == ValueKind::kParameter) last_parameter_ = id;
  }
  if (custom_function_) watch_custom_function(call);
  make_offset_relative(call);
}

/// The result of a custom function that works in place may be seen through another view only.
void Tracer::watch_custom_function(const Call& call) {
  for (const at::Tensor& tensor : inner_arguments_) check_history(tensor);
  for (const at::Tensor& tensor : call.tensors) {
    if (tensor.defined() && !at::GradMode::is_enabled()) inner_arguments_.push_back(tensor);
  }
}

/// An input lies somewhere else in its storage in each microbatch, and a tensor that crossed
/// between ranks has a storage of its own: an offset may only be the tensor's own, which is what
/// none means. Parameters and buffers stay where they are.
void Tracer::make_offset_relative(Call& call) const {
  const int index = storage_offset_argument(call.op->schema());
  if (index < 0 || call.ids[0] == kUndefined) return;
  c10::IValue& offset = call.arguments[index].constant;
  if (options_.table->find(call.tensors[0]) != nullptr || !offset.isInt()) return;
  call.absolute_offset = true;
  if (offset.toInt() == call.tensors[0].storage_offset()) offset = c10::IValue();
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
    if (same || a.sizes() != b.sizes()) {
      torch::jit::drop(stack, 2);
      stack.push_back(same);
      return true;
    }
  } else if (reads_only_metadata(name) || !has_tensor_argument(schema)) {
    op.callBoxed(stack);
    return true;
  }
  refuse_replaced_storage(name);
  refuse("operator " + name + " reads the data of a tensor on the host",
         "A step is captured as a graph of operators, so what it does cannot depend on data. Use "
         "tensor operators instead (torch::where, masks), return the tensor from the step and read "
         "it there, or make the module that needs the value a leaf: smp::leaf(module)(x)");
}

void Tracer::refuse_replaced_storage(const std::string& name) const {
  if (!replaces_storage(name)) return;
  refuse("operator " + name + " replaces the storage of a tensor (set_data, resize_)",
         "Make a new tensor instead, or make the module that does it a leaf: smp::leaf(module)(x)");
}

/// A view of memory that its argument does not show.
void Tracer::refuse_views_beyond(const Call& call) {
  const int index = storage_offset_argument(call.op->schema());
  if (index < 0 || call.ids[0] == kUndefined) return;
  if (options_.table->find(call.tensors[0]) != nullptr) return;
  const auto last_element = [](c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d)
      last += std::max<int64_t>(sizes[d] - 1, 0) * strides[d];
    return last;
  };
  const at::Tensor& argument = concrete(call.ids[0]);
  const auto sizes = call.arguments[index - 2].constant.toIntVector();
  const auto strides = call.arguments[index - 1].constant.toIntVector();
  const bool elsewhere = !call.arguments[index].constant.isNone() ||
                         (call.absolute_offset && argument.storage_offset() != 0);
  if (!elsewhere &&
      last_element(sizes, strides) <= last_element(argument.sizes(), argument.strides())) {
    return;
  }
  refuse("operator " + call.op->schema().name() +
             " reaches elements of the storage that its argument does not show, which may lie on "
             "another rank or in another microbatch",
         "Use slice(), narrow() or select() of the tensor that shows them");
}

void Tracer::refuse_unsupported(const Call& call) {
  const auto& schema = call.op->schema();
  const std::string& name = schema.name();
  refuse_replaced_storage(name);
  refuse_views_beyond(call);
  for (const Argument& argument : call.arguments) {
    if (argument.kind == Argument::Kind::kConstant && argument.constant.isGenerator()) {
      refuse("operator " + name + " draws from an explicit generator",
             "Leave the generator out: random operators of a step draw from streams keyed by the "
             "configuration's \"seed\", the step and the microbatch");
    }
  }
  if (!call.op->hasTag(at::Tag::dynamic_output_shape)) return;
  bool depends_on_data = true;
  if (name == "aten::index") {
    depends_on_data = false;
    for (size_t i = 1; i < call.tensors.size(); ++i) {
      const at::Tensor& index = call.tensors[i];
      depends_on_data |=
          index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
    }
  }
  // Given the number of classes, its result has a shape that follows.
  if (name == "aten::one_hot") depends_on_data = call.arguments[1].constant.toInt() < 0;
  if (depends_on_data) {
    refuse("the result shape of operator " + name + " depends on data",
           "Use an operator whose result has a fixed shape (torch::where, a mask that multiplies), "
           "or make the module that calls it a leaf: smp::leaf(module)(x)");
  }
}

// ---------------------------------------------------------------------------------------------
// The end

void Tracer::backward(const std::vector<at::Tensor>& tensors,
                      const std::vector<at::Tensor>& gradients) {
  SMP_CHECK_WITH(UsageError, intercepting(), where(),
                 ": backward was called inside a leaf module. Call model->backward in the step "
                 "function, on what the leaf returns");
  const UninterceptedScope own;
  SMP_CHECK_WITH(UsageError, roots_.empty(), where(),
                 ": backward was called a second time. Call model->backward once a step, with all "
                 "losses: model->backward({a, b}), or add them up");
  SMP_CHECK_WITH(UsageError, gradients.empty() || gradients.size() == tensors.size(), where(),
                 ": backward got ", tensors.size(), " tensors and ", gradients.size(),
                 " gradients; give one gradient for each tensor, or none");
  for (size_t i = 0; i < tensors.size(); ++i) {
    BackwardRoot root;
    root.value = lookup(tensors[i]);
    if (!gradients.empty()) {
      root.gradient = lookup(gradients[i]);
      if (!verifying()) settle_read(root.gradient);
    }
    // What operators run on knows best: a view of the tensor may have been written. Where the run
    // follows a known graph, that one was checked.
    const bool differentiable =
        root.value != kUndefined && (verifying() || concrete(root.value).requires_grad());
    SMP_CHECK_WITH(UsageError, differentiable, where(),
                   ": backward was called on a tensor that does not depend on a parameter that "
                   "requires a gradient (or gradients are off: is a NoGradGuard alive?)");
    SMP_CHECK_WITH(UsageError, root.gradient != kUndefined || tensors[i].numel() == 1, where(),
                   ": backward was called on a tensor of shape ", tensors[i].sizes(),
                   " without a gradient; reduce it to a scalar (loss.mean()) or give its gradient");
    roots_.push_back(root);
  }
}

TraceResult Tracer::finish(const std::vector<at::Tensor>& outputs) {
  check_hooks();
  for (const at::Tensor& tensor : inner_arguments_) check_history(tensor);
  for (const at::Tensor& output : outputs) outputs_.push_back(lookup(output));
  TraceResult result;
  for (Live& live : live_) {
    const Graph& graph = *live.graph;
    const auto same_roots = [&] {
      if (graph.roots.size() != roots_.size()) return false;
      for (size_t i = 0; i < roots_.size(); ++i) {
        if (graph.roots[i].value != roots_[i].value) return false;
        if (graph.roots[i].gradient != roots_[i].gradient) return false;
      }
      return true;
    };
    bool same = graph.operators.size() == next_operator_ && graph.outputs == outputs_ &&
                same_roots() && graph.values.size() == value_count_ + pending_.size();
    for (size_t i = 0; same && i < pending_.size(); ++i) {
      const Value& expected = graph.values[value_count_ + i];
      same = expected.kind == pending_[i].kind && expected.name == pending_[i].name &&
             expected.meta == pending_[i].meta;
      if (same && pending_[i].content.defined() &&
          !same_content(pending_[i].content, expected.content)) {
        live.contents.push_back(
            {static_cast<ValueId>(value_count_ + i), clone_content(pending_[i].content)});
      }
    }
    if (!same) continue;
    result.match = live.graph;
    result.constants = std::move(live.constants);
    result.contents = std::move(live.contents);
    for (const auto& [id, tensor] : literals_) {
      if (!same_content(tensor, graph.values[id].content)) {
        result.contents.push_back({id, clone_content(tensor)});
      }
    }
    return result;
  }
  if (verifying()) {
    leave_candidates(c10::str("the function ends after ", next_operator_,
                              " operators, or returns or differentiates other tensors"));
  }
  for (const auto& [id, tensor] : literals_) graph_->values[id].content = clone_content(tensor);
  for (ValueId output : outputs_) settle_read(output);
  for (size_t i = 0; i < graph_->values.size() && graph_->values[i].kind == ValueKind::kInput;
       ++i) {
    graph_->inputs.push_back(static_cast<ValueId>(i));
  }
  graph_->outputs = outputs_;
  graph_->roots = roots_;
  assign_scopes();
  for (size_t id = 0; id < concrete_.size(); ++id) {
    const auto& user = concrete_[id].user;
    if (user && !user->expired()) result.kept.push_back({static_cast<ValueId>(id), *user});
  }
  result.recorded = std::move(graph_);
  result.difference = difference_;
  result.checksums = std::move(checksums_);
  return result;
}

}  // namespace smp::graph
