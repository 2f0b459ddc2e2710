#include "graph/tracer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <xxhash.h>

#include <cmath>
#include <set>

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

bool is_tensor_type(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) ||
         type->isSubtypeOf(*c10::ListType::ofTensors());
}

bool returns_host_value(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (!is_tensor_type(result.type())) return true;
  }
  return false;
}

/// Operators with a host result that follows from shapes and types alone.
bool reads_only_metadata(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::is_same_size", "aten::is_floating_point",  "aten::is_complex",    "aten::is_signed",
      "aten::result_type",  "aten::can_cast",           "aten::promote_types", "aten::size",
      "aten::stride",       "aten::sym_size",           "aten::sym_stride",    "aten::sym_numel",
      "aten::is_inference", "aten::cudnn_is_acceptable"};
  return names.count(name) > 0;
}

/// Normalisations that update their running statistics (arguments 3 and 4, if argument 5 is
/// true) without saying so in their schema.
bool writes_running_statistics(const std::string& name) {
  static const std::set<std::string> names = {"aten::batch_norm", "aten::instance_norm",
                                              "aten::native_batch_norm",
                                              "aten::_batch_norm_impl_index"};
  return names.count(name) > 0;
}

/// Operators whose result is another tensor's storage under their feet.
bool replaces_storage(const std::string& name) {
  return name == "aten::set_" || name == "aten::resize_" || name == "aten::resize_as_" ||
         name == "aten::_has_compatible_shallow_copy_type";
}

bool has_tensor_argument(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    auto type = argument.type();
    if (type->kind() == c10::TypeKind::OptionalType) {
      type = type->expectRef<c10::OptionalType>().getElementType();
    }
    if (is_tensor_type(type)) return true;
  }
  return false;
}

bool is_uninitialised_factory(const std::string& name) {
  return name.rfind("aten::empty", 0) == 0 || name.rfind("aten::new_empty", 0) == 0;
}

bool same_constant(const c10::IValue& a, const c10::IValue& b) {
  if (a.isDouble() && b.isDouble()) {
    return a.toDouble() == b.toDouble() || (std::isnan(a.toDouble()) && std::isnan(b.toDouble()));
  }
  if (a.isInt() && b.isInt()) return a.toInt() == b.toInt();
  if (a.isBool() && b.isBool()) return a.toBool() == b.toBool();
  if (a.isNone() || b.isNone()) return a.isNone() && b.isNone();
  // Types differ in kind (an int where a double was): another graph.
  return a.tagKind() == b.tagKind() && a == b;
}

bool same_kind(const c10::IValue& a, const c10::IValue& b) { return a.tagKind() == b.tagKind(); }

uint64_t hash_tensor(const at::Tensor& tensor, uint64_t seed) {
  at::NoGradGuard no_grad;
  const at::Tensor flat = tensor.detach().cpu().contiguous();
  return XXH64(flat.const_data_ptr(), flat.nbytes(), seed);
}

bool same_content(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         hash_tensor(a, 0) == hash_tensor(b, 0);
}

at::Tensor clone_data(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  return tensor.detach().clone();
}

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

std::string module_of(const std::string& tensor_name) {
  const size_t dot = tensor_name.rfind('.');
  return dot == std::string::npos ? "" : tensor_name.substr(0, dot);
}

}  // namespace

Tracer* Tracer::current() { return active; }

Tracer::Tracer(TraceOptions options) : options_(std::move(options)) {}
Tracer::~Tracer() = default;

TraceResult Tracer::run(const std::vector<at::Tensor>& inputs, const Function& function) {
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
    SMP_CHECK_WITH(CaptureError, !inputs[i].requires_grad(), "step function \"",
                   options_.step_name, "\": input ", i,
                   " requires a gradient; a step trains the parameters of its models only. Pass "
                   "input.detach()");
    Value value;
    value.kind = ValueKind::kInput;
    value.name = std::to_string(i);
    value.meta = TensorMeta::of(inputs[i]);
    values.push_back(std::move(value));
    passed.push_back(options_.execute ? inputs[i]
                                      : make_placeholder(values.back().meta, options_.step_name));
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
    value_count_ = static_cast<ValueId>(values.size());
    for (size_t i = 0; i < passed.size(); ++i) bind(passed[i], static_cast<ValueId>(i));
    return;
  }
  graph_ = std::make_unique<Graph>();
  for (size_t i = 0; i < passed.size(); ++i) add_value(std::move(values[i]), passed[i]);
}

void Tracer::bind(const at::Tensor& tensor, ValueId id) {
  auto weak = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
  known_.insert_or_assign(tensor.unsafeGetTensorImpl(), Known{id, std::move(weak)});
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
    graph_->values.push_back(std::move(value));
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
  const auto it = known_.find(tensor.unsafeGetTensorImpl());
  if (it != known_.end()) {
    if (!verifying()) check_history(tensor);
    return it->second.id;
  }
  if (const auto* entry = options_.table->find(tensor)) return define_from_table(*entry);
  const ValueId alias = find_alias(tensor);
  return alias != kUndefined ? alias : define_constant(tensor);
}

/// A tensor made without an operator call on storage that is known: a shallow copy, as
/// `torch::zeros` returns one, or `tensor.data()`.
ValueId Tracer::find_alias(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return kUndefined;
  const auto storage = storages_.find(tensor.storage().unsafeGetStorageImpl());
  if (storage == storages_.end()) return kUndefined;
  // `torch::tensor` copies shallowly and lets the original go.
  const StorageInfo& last = storage->second;
  if (last.offset == tensor.storage_offset() && value(last.id).meta == TensorMeta::of(tensor)) {
    const ValueId id = last.id;
    bind(tensor, id);
    return id;
  }
  for (auto& [impl, known] : known_) {
    const auto owner = known.keep.lock();
    if (!owner) continue;
    const at::Tensor other{owner};
    const bool same = other.has_storage() && other.storage().is_alias_of(tensor.storage()) &&
                      other.sizes() == tensor.sizes() && other.strides() == tensor.strides() &&
                      other.storage_offset() == tensor.storage_offset() &&
                      other.scalar_type() == tensor.scalar_type();
    if (!same) continue;
    if (other.requires_grad() == tensor.requires_grad()) {
      const ValueId id = known.id;
      bind(tensor, id);
      return id;
    }
    static const auto detach = c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "");
    torch::jit::Stack stack{other};
    call(detach, stack);
    const ValueId id = lookup(stack[0].toTensor());
    bind(tensor, id);
    return id;
  }
  refuse(
      "uses a tensor that shares memory with another one of the step but was not made from it "
      "by an operator (tensor.data() of a view, set_data, from_blob)",
      "Make it with an operator, such as detach() or as_strided()");
}

ValueId Tracer::define_from_table(const TensorTable::Entry& entry) {
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
        "uses a tensor with a gradient history that was computed outside the step function (or "
        "on another thread)",
        "Compute it inside the step function on the calling thread, or pass tensor.detach()");
  }
  if (tensor.requires_grad()) {
    refuse(c10::str("uses a parameter of shape ", tensor.sizes(),
                    " that belongs to no DistributedModel"),
           "Register it in a module (register_parameter, register_module) and wrap that module in "
           "a DistributedModel");
  }
  for (const auto& entry : options_.table->entries()) {
    if (entry.tensor.grad().is_same(tensor)) {
      refuse("reads the gradient of parameter \"" + entry.name + "\"",
             "Gradients are complete when the step has returned: read them there");
    }
  }
  Value value;
  value.kind = ValueKind::kConstant;
  value.meta = TensorMeta::of(tensor);
  value.content = verifying() ? tensor : clone_data(tensor);
  constexpr int64_t kLargeBytes = 1 << 20;
  if (!verifying() && value.meta.nbytes() > kLargeBytes) {
    TORCH_WARN(error_prefix(), "step function \"", options_.step_name, "\" uses a tensor of ",
               value.meta.nbytes() / kLargeBytes,
               " MiB that is neither an input nor a parameter or buffer. It is kept as a constant "
               "of the graph; register it as a buffer if it belongs to the model");
  }
  return add_value(std::move(value), tensor);
}

void Tracer::check_history(const at::Tensor& tensor) const {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || meta->grad_fn_ == nullptr) return;
  const std::string name = meta->grad_fn_->name();
  if (name.find("CppNode") == std::string::npos) return;
  refuse("uses the result of a custom autograd function (" + name +
             "), whose backward cannot be captured",
         "Write the function with differentiable tensor operators");
}

// ---------------------------------------------------------------------------------------------
// One operator call

std::string Tracer::where() const {
  std::string text = "step function \"" + options_.step_name + "\"";
  if (!last_scope_.empty()) text += ", in or after module \"" + last_scope_ + "\"";
  return text;
}

void Tracer::refuse(const std::string& what, const std::string& remedy) const {
  detail::fail<CaptureError>(where(), ": ", what, ". ", remedy, ".");
}

void Tracer::call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  SMP_CHECK_WITH(UsageError, torch::autograd::get_current_graph_task_id() == -1, where(),
                 ": backward() or autograd::grad was called inside the step function. The step "
                 "runs the pipeline's backward pass itself: call model->backward(loss) instead");
  if (answer_host_value(op, stack)) return;
  Call current;
  collect(op, stack, current);
  if (verifying() && verify(current, stack)) return;
  refuse_unsupported(current);
  record(current, stack);
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
    const Value& argument = value(id);
    if (argument.kind == ValueKind::kParameter) last_scope_ = module_of(argument.name);
  }
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
  refuse("operator " + name + " reads the data of a tensor on the host",
         "A step is captured as a graph of operators, so what it does cannot depend on data. Use "
         "tensor operators instead (torch::where, masks), or return the tensor from the step and "
         "read it there");
}

void Tracer::refuse_unsupported(const Call& call) const {
  const auto& schema = call.op->schema();
  const std::string& name = schema.name();
  if (replaces_storage(name)) {
    refuse("operator " + name + " replaces the storage of a tensor (set_data, resize_)",
           "Make a new tensor instead");
  }
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
  if (depends_on_data) {
    refuse("the result shape of operator " + name + " depends on data",
           "Use an operator whose result has a fixed shape (torch::where, a mask that multiplies)");
  }
}

// ---------------------------------------------------------------------------------------------
// Verifying

bool Tracer::verify(Call& call, torch::jit::Stack& stack) {
  const ExecutionMode mode = ExecutionMode::current();
  std::string difference;
  std::vector<Live> still;
  for (Live& live : live_) {
    if (auto found = differs(live, call, mode)) {
      difference = std::move(*found);
    } else {
      still.push_back(std::move(live));
    }
  }
  if (still.empty()) {
    leave_candidates(difference);
    return false;
  }
  live_ = std::move(still);
  pending_.clear();
  push_recorded_results(call, stack);
  const Graph& graph = *live_[0].graph;
  const Operator& op = graph.operators[next_operator_++];
  value_count_ = op.first_result;
  for (ValueId id : op.results) value_count_ += id != kUndefined;
  return true;
}

/// The first way in which the call is not the candidate's next operator; notes what may differ.
std::optional<std::string> Tracer::differs(Live& live, const Call& call,
                                           const ExecutionMode& mode) const {
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
  if (op.handle.schema().operator_name() != call.op->schema().operator_name()) {
    return describe("is another one");
  }
  if (!(op.mode == mode)) return describe("runs in another mode (grad, autocast)");
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
    if (!same_kind(expected.constant, got.constant) || !is_patchable(call.op->schema(), i)) {
      return describe("has another constant as argument \"" +
                      call.op->schema().arguments()[i].name() + "\"");
    }
    constants.push_back({static_cast<int>(next_operator_), static_cast<int>(i), got.constant});
  }
  std::vector<ContentOverride> contents;
  for (size_t i = 0; i < pending_.size(); ++i) {
    const ValueId id = value_count_ + static_cast<ValueId>(i);
    const Value& expected = graph.values[id];
    const Value& got = pending_[i];
    if (expected.kind != got.kind || expected.name != got.name || !(expected.meta == got.meta)) {
      return describe(c10::str("reads ", graph::to_string(got.kind), " ", got.name, " : ",
                               got.meta.to_string()));
    }
    if (got.content.defined() && !same_content(got.content, expected.content)) {
      contents.push_back({id, clone_data(got.content)});
    }
  }
  live.constants.insert(live.constants.end(), constants.begin(), constants.end());
  live.contents.insert(live.contents.end(), contents.begin(), contents.end());
  return std::nullopt;
}

void Tracer::push_recorded_results(const Call& call, torch::jit::Stack& stack) {
  const Graph& graph = *live_[0].graph;
  const Operator& op = graph.operators[next_operator_];
  const auto& schema = call.op->schema();
  if (op.results.size() == 1 && op.results[0] != kUndefined &&
      graph.values[op.results[0]].kind == ValueKind::kLiteral) {
    // Host code is about to write into it.
    call.op->callBoxed(stack);
    literals_.emplace_back(op.results[0], stack.back().toTensor());
    bind(stack.back().toTensor(), op.results[0]);
    return;
  }
  torch::jit::drop(stack, schema.arguments().size());
  size_t next = 0;
  const auto take = [&]() -> at::Tensor {
    const ValueId id = op.results[next];
    const int argument = op.result_is_argument[next++];
    if (id == kUndefined) return at::Tensor();
    at::Tensor tensor = argument >= 0 ? call.tensors[argument]
                                      : make_placeholder(graph.values[id].meta, options_.step_name);
    bind(tensor, id);
    return tensor;
  };
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (schema.returns()[i].type()->kind() == c10::TypeKind::ListType) {
      c10::List<at::Tensor> list;
      const int length = op.list_lengths[i];
      for (int k = 0; k < length; ++k) list.push_back(take());
      stack.push_back(std::move(list));
    } else {
      stack.push_back(take());
    }
  }
}

/// Goes on as a recording: what was verified so far becomes the beginning of a new graph.
void Tracer::leave_candidates(const std::string& difference) {
  difference_ = difference;
  const Live& last = live_[0];
  const Graph& from = *last.graph;
  graph_ = std::make_unique<Graph>();
  graph_->values.assign(from.values.begin(), from.values.begin() + value_count_);
  graph_->operators.assign(from.operators.begin(), from.operators.begin() + next_operator_);
  graph_->alias_sets = from.alias_sets;
  for (const ConstantOverride& change : last.constants) {
    graph_->operators[change.operator_index].arguments[change.argument].constant = change.value;
  }
  for (const ContentOverride& change : last.contents) {
    graph_->values[change.value].content = change.content;
  }
  for (const Operator& op : graph_->operators) random_count_ += op.random_ordinal >= 0;
  for (Value& value : pending_) {
    if (value.content.defined()) value.content = clone_data(value.content);
    value.alias_set = graph_->alias_sets++;
    graph_->values.push_back(std::move(value));
  }
  pending_.clear();
  live_.clear();
  for (auto& [storage, info] : storages_) info.alias_set = graph_->values[info.id].alias_set;
}

// ---------------------------------------------------------------------------------------------
// Recording

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
    fresh_[alias_set] = {id, empty ? at::Tensor() : clone_data(result)};
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
    if (tensor.defined()) hash = hash_tensor(tensor, hash);
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

// ---------------------------------------------------------------------------------------------
// The end

void Tracer::backward(const std::vector<at::Tensor>& tensors,
                      const std::vector<at::Tensor>& gradients) {
  SMP_CHECK_WITH(UsageError, roots_.empty(), where(),
                 ": backward was called a second time. Call model->backward once a step, with "
                 "all losses: model->backward({a, b}), or add them up");
  SMP_CHECK_WITH(UsageError, gradients.empty() || gradients.size() == tensors.size(), where(),
                 ": backward got ", tensors.size(), " tensors and ", gradients.size(),
                 " gradients; give one gradient for each tensor, or none");
  for (size_t i = 0; i < tensors.size(); ++i) {
    BackwardRoot root;
    root.value = lookup(tensors[i]);
    if (!gradients.empty()) root.gradient = lookup(gradients[i]);
    SMP_CHECK_WITH(UsageError, root.value != kUndefined && tensors[i].requires_grad(), where(),
                   ": backward was called on a tensor that does not depend on a parameter that "
                   "requires a gradient");
    SMP_CHECK_WITH(UsageError, root.gradient != kUndefined || tensors[i].numel() == 1, where(),
                   ": backward was called on a tensor of shape ", tensors[i].sizes(),
                   " without a gradient; reduce it to a scalar (loss.mean()) or give its gradient");
    roots_.push_back(root);
  }
}

TraceResult Tracer::finish(const std::vector<at::Tensor>& outputs) {
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
            {static_cast<ValueId>(value_count_ + i), clone_data(pending_[i].content)});
      }
    }
    if (!same) continue;
    result.match = live.graph;
    result.constants = std::move(live.constants);
    result.contents = std::move(live.contents);
    for (const auto& [id, tensor] : literals_) {
      if (!same_content(tensor, graph.values[id].content)) {
        result.contents.push_back({id, clone_data(tensor)});
      }
    }
    return result;
  }
  if (verifying()) {
    leave_candidates(c10::str("the function ends after ", next_operator_,
                              " operators, or returns or differentiates other tensors"));
  }
  for (const auto& [id, tensor] : literals_) graph_->values[id].content = clone_data(tensor);
  for (size_t i = 0; i < graph_->values.size() && graph_->values[i].kind == ValueKind::kInput;
       ++i) {
    graph_->inputs.push_back(static_cast<ValueId>(i));
  }
  graph_->outputs = outputs_;
  graph_->roots = roots_;
  assign_scopes();
  result.recorded = std::move(graph_);
  result.difference = difference_;
  result.checksums = std::move(checksums_);
  return result;
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
