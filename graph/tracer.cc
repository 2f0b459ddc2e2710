#include "graph/tracer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>

#include "core/check.h"
#include "graph/content.h"
#include "graph/differentiate.h"
#include "graph/engine.h"
#include "graph/grad_shapes.h"
#include "graph/late_writes.h"
#include "graph/leaf.h"
#include "graph/not_equal.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"
#include "graph/stack_tensors.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

thread_local Tracer* active = nullptr;

class ActiveScope {
 public:
  explicit ActiveScope(Tracer* tracer) { active = tracer; }
  ~ActiveScope() { active = nullptr; }
};

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
  ActiveScope scope(this);
  return finish(run_function(function, passed));
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
    core::fail<Error>(where(), ": ", error.what_without_backtrace());
  }
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
  core::fail<CaptureError>(where(), ": ", what, ". ", remedy, ".");
}

ExecutionMode Tracer::mode() const {
  ExecutionMode mode = ExecutionMode::current();
  mode.after_backward = differentiated_;
  return mode;
}

void Tracer::Call::clear() {
  arguments.clear();
  tensors.clear();
  ids.clear();
  absolute_offset = false;
}

void Tracer::call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  check_hooks();
  // What was recorded as an operator is none that answers the host.
  if (!is_expected(op) && answer_host_value(op, stack)) return;
  // Taken while it is in use: a call may derive a value with a call of its own.
  Call current = std::move(spare_call_);
  collect(op, stack, current);
  if (!roots_.empty()) keep_roots(current);
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

c10::SmallVector<ValueId, 1> Tracer::written_by(const Call& call) const {
  const auto constant = [&](size_t i) -> const c10::IValue& { return call.arguments[i].constant; };
  c10::SmallVector<ValueId, 1> written;
  for (size_t i : written_arguments(call.op->schema(), constant)) {
    for (ValueId id : call.arguments[i].values) {
      if (id != kUndefined) written.push_back(id);
    }
  }
  return written;
}

/// The program's backward pass was over when it called the operator. So what `backward` was called
/// on, and the gradient it got, are copied before the operator writes them.
void Tracer::keep_roots(const Call& call) {
  for (ValueId written : written_by(call)) {
    for (BackwardRoot& root : roots_) {
      if (share_storage(root.value, written)) root.value = keep_root(root.value);
      if (share_storage(root.gradient, written)) root.gradient = keep_root(root.gradient);
    }
  }
}

bool Tracer::share_storage(ValueId a, ValueId b) const {
  if (a == kUndefined || b == kUndefined) return false;
  // What was first seen in this call has no alias set yet while verifying.
  return a == b || (value(a).alias_set >= 0 && value(a).alias_set == value(b).alias_set);
}

ValueId Tracer::keep_root(ValueId root) {
  const at::Tensor tensor = tensor_for(root);
  const c10::InferenceMode normal(false);
  const at::AutoGradMode with_history(true);
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
  refuse("operator " + name + " reads the data of a tensor on the host",
         "A step is captured as a graph of operators, so what it does cannot depend on data. Use "
         "tensor operators instead (torch::where, masks), return the tensor from the step and read "
         "it there, or make the module that needs the value a leaf: smp::leaf(module)(x)");
}

/// Whether the program itself has the data of the call's tensors: constants made outside, and what
/// host code may fill. It is the same for all microbatches, and the program reads it in each step.
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
  if (!verifying() && options_.execute && at::equal(concrete(lookup(a)), concrete(lookup(b)))) {
    return false;
  }
  torch::jit::Stack arguments{a, b};
  call(not_equal_operator(), arguments);
  return true;
}

void Tracer::refuse_replaced_storage(const std::string& name) const {
  if (!has_trait(name, OperatorTrait::kReplacesStorage)) return;
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

void Tracer::refuse_grad_through_leaf(const Call& call) {
  if (!(*call.op == grad_operator())) return;
  const std::string leaf = leaf_on_the_way(*graph_, call.arguments);
  if (leaf.empty()) return;
  refuse("autograd::grad goes back through leaf module \"" + leaf +
             "\", whose operators are not part of the graph",
         "Call autograd::grad inside the leaf, or let the module be captured");
}

void Tracer::refuse_unsupported(const Call& call) {
  const auto& schema = call.op->schema();
  const std::string& name = schema.name();
  refuse_replaced_storage(name);
  refuse_views_beyond(call);
  refuse_grad_through_leaf(call);
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
  const ExecutionMode mode = ExecutionMode::current();
  SMP_CHECK_WITH(UsageError, roots_.empty(), where(),
                 ": backward was called a second time. Call model->backward once a step, with all "
                 "losses: model->backward({a, b}), or add them up");
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
  differentiated_ = true;
}

/// What is written after `backward` is written to a copy where a backward may need what was there
/// (`late_writes.h`). But a leaf works on the buffers of its module themselves.
void Tracer::check_late_writes() const {
  const std::vector<bool> separate = sets_to_separate(*graph_);
  for (const Operator& op : graph_->operators) {
    if (!is_leaf(op.handle)) continue;
    for_each_argument(op, [&](ValueId id) {
      const int alias_set = graph_->values[id].alias_set;
      const Value& base = graph_->values[first_aliases_.at(alias_set)];
      const bool lasts = base.kind == ValueKind::kBuffer || base.kind == ValueKind::kParameter;
      const bool writes = std::count(op.writes.begin(), op.writes.end(), alias_set) > 0;
      if (!separate[alias_set] || !lasts || !writes) return;
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

/// A leaf that writes parameters keeps copies of what its own backward needs.
void Tracer::check_written_parameters() const {
  if (graph_->roots.empty()) return;
  std::vector<const Operator*> writer(graph_->alias_sets, nullptr);
  for (const Operator& op : graph_->operators) {
    for (int set : op.writes) {
      const bool parameter = graph_->values[first_aliases_.at(set)].kind == ValueKind::kParameter;
      if (parameter) writer[set] = &op;
    }
  }
  for (const Operator& op : graph_->operators) {
    if (is_leaf(op.handle)) continue;
    for_each_argument(op, [&](ValueId id) {
      const int set = graph_->values[id].alias_set;
      if (writer[set] == nullptr) return;
      core::fail<CaptureError>(
          "step function \"", options_.step_name, "\": leaf module \"",
          leaf_call(writer[set]->arguments[0].constant)->module, "\" writes parameter \"",
          graph_->values[first_aliases_.at(set)].name, "\", and operator ", op.name(),
          " reads it, whose backward may need what was there. Let leaves only read it, or give the "
          "operator a copy that the leaf returns: weight.clone()");
    });
  }
}

/// To be called at the end: it lets go of what the tracer holds itself.
std::vector<ValueId> Tracer::released_constants() {
  concrete_.clear();
  host_data_.clear();
  inner_arguments_.clear();
  ends_.clear();
  std::vector<ValueId> result;
  for (const auto& [id, tensor] : constants_) {
    if (tensor.expired()) result.push_back(id);
  }
  return result;
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
  TraceResult result;
  for (Live& live : live_) {
    const Graph& graph = *live.graph;
    const auto same_roots = [&] {
      if (graph.roots.size() != roots_.size()) return false;
      for (size_t i = 0; i < roots_.size(); ++i) {
        if (graph.roots[i].value != roots_[i].value) return false;
        if (graph.roots[i].gradient != roots_[i].gradient) return false;
        if (!(graph.roots[i].mode == roots_[i].mode)) return false;
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
    for (const auto& [id, content] : literals_) {
      if (graph.values[id].kind != ValueKind::kLiteral) continue;  // and not filled
      if (!same_content(content, graph.values[id].content))
        result.contents.push_back({id, content});
    }
    return result;
  }
  if (verifying()) {
    leave_candidates(c10::str("the function ends after ", next_operator_,
                              " operators, or returns or differentiates other tensors"));
  }
  for (size_t i = 0; i < graph_->values.size() && graph_->values[i].kind == ValueKind::kInput;
       ++i) {
    graph_->inputs.push_back(static_cast<ValueId>(i));
  }
  graph_->outputs = outputs_;
  graph_->roots = roots_;
  check_late_writes();
  check_written_parameters();
  assign_scopes();
  for (size_t id = 0; id < concrete_.size(); ++id) {
    const auto& user = concrete_[id].user;
    if (user && !user->expired()) result.kept.push_back({static_cast<ValueId>(id), *user});
  }
  result.released = released_constants();
  result.recorded = std::move(graph_);
  result.difference = difference_;
  result.checksums = std::move(checksums_);
  return result;
}

}  // namespace smp::graph
