// SPDX-License-Identifier: Apache-2.0
// The part of Tracer that knows tensors again: which value of the graph the code holds.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "core/check.h"
#include "graph/capture.h"
#include "graph/content.h"
#include "graph/guard.h"
#include "graph/shapes.h"
#include "graph/tracer.h"

namespace smp::graph {
namespace {

bool has_hooks(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || meta->cpp_hooks_list_ == nullptr) return false;
  const auto& hooks = *meta->cpp_hooks_list_;  // one that was removed is empty
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) { return hook != nullptr; });
}

/// True if the two hold some of the same bytes.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!a.has_storage() || !b.has_storage() || a.device() != b.device()) return false;
  // Without checks: another rank's tensor has no data here, and overlaps nothing.
  const auto range = [](const at::Tensor& tensor) {
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    const auto* begin = static_cast<const char*>(storage._mutable_data_ptr_no_checks().get());
    return std::pair(begin, begin + storage.nbytes());
  };
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

/// How the inputs of a run differ from those of a graph.
std::string difference_of_inputs(const std::vector<Value>& inputs, const Graph& graph) {
  if (inputs.size() != graph.inputs.size()) {
    return c10::str("there are ", inputs.size(), " input tensors, and were ", graph.inputs.size());
  }
  const auto describe = [](const TensorMeta& meta) {
    return c10::str(meta.dtype, c10::IntArrayRef(meta.sizes), " with strides ",
                    c10::IntArrayRef(meta.strides));
  };
  std::string text;
  for (size_t i = 0; i < inputs.size() && text.empty(); ++i) {
    const TensorMeta &is = inputs[i].meta, &was = graph.values[i].meta;
    if (!(is == was))
      text = c10::str("input ", i, " is ", describe(is), ", and was ", describe(was));
  }
  return text;
}

}  // namespace

const Value& Tracer::value(ValueId id) const {
  return guard_ != nullptr ? guard_->value(id) : capture_->value(id);
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
    for (size_t i = 0; i < passed.size(); ++i) bind(passed[i], static_cast<ValueId>(i));
    return;
  }
  if (!options_.candidates.empty()) {
    difference_ = difference_of_inputs(values, *options_.candidates.front());
  }
  guard_.reset();
  capture_ = make_capture({});
  for (size_t i = 0; i < passed.size(); ++i) {
    bind(passed[i], capture_->add(std::move(values[i]), inputs[i]));
  }
}

/// A tensor that is known for the value: the function may have let its own go.
at::Tensor Tracer::tensor_for(ValueId id) {
  const at::Tensor tensor = make_placeholder(value(id).meta, options_.step_name);
  bind(tensor, id);
  return tensor;
}

void Tracer::bind(const at::Tensor& tensor, ValueId id) {
  const bool requires_grad = tensor.requires_grad();
  if (requires_grad) number_placeholder(tensor, static_cast<uint32_t>(id));
  known_.add(tensor.unsafeGetTensorImpl(), [&] {
    return c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
  }) = {id, requires_grad};
  if (!tensor.has_storage()) return;
  const c10::Storage& storage = tensor.storage();
  storages_.add(storage.unsafeGetStorageImpl(), [&] { return storage.getWeakStorageImpl(); }) = {
      id, tensor.storage_offset()};
}

/// Adds a value that no operator made; `tensor` is the one that the user's code holds.
ValueId Tracer::add_value(Value value, const at::Tensor& tensor) {
  ValueId id;
  if (guard_ != nullptr) {
    id = guard_->add(std::move(value));
  } else {
    value.alias_set = alias_set_of(tensor);
    id = capture_->add(std::move(value), tensor);
    if (this->value(id).kind == ValueKind::kConstant) note_constant(id, tensor);
  }
  bind(tensor, id);
  return id;
}

/// -1 for memory that the run has not seen.
int Tracer::alias_set_of(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return -1;
  const OnStorage* known = storages_.find(tensor.storage().unsafeGetStorageImpl());
  return known == nullptr ? -1 : value(known->id).alias_set;
}

ValueId Tracer::lookup(const at::Tensor& tensor) {
  if (!tensor.defined()) return kUndefined;
  if (custom_function_) check_history(tensor);
  if (const Known* known = known_.find(tensor.unsafeGetTensorImpl())) {
    if (!changed_by_hand(tensor, *known)) return known->id;
    return require_grad(tensor, tensor_for(known->id));
  }
  if (const auto* entry = options_.table->find(tensor)) return define_from_table(*entry);
  if (tensor.requires_grad() && tensor.is_leaf()) {  // `torch::zeros(sizes, requires_grad)`
    const at::Tensor as_made = tensor.detach();
    if (find_alias(as_made) != kUndefined) return require_grad(tensor, as_made);
  }
  const ValueId alias = find_alias(tensor);
  return alias != kUndefined ? alias : define_constant(tensor);
}

/// A tensor that is known and shows the same elements.
at::Tensor Tracer::find_shallow_copy(const at::Tensor& tensor) const {
  at::Tensor found;
  known_.for_each_alive([&](const auto& owner, const Known&) {
    const at::Tensor other{owner};
    if (other.has_storage() &&
        other.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl() &&
        other.sizes() == tensor.sizes() && other.strides() == tensor.strides() &&
        other.storage_offset() == tensor.storage_offset() &&
        other.scalar_type() == tensor.scalar_type()) {
      found = other;
    }
    return !found.defined();
  });
  return found;
}

/// A tensor made without an operator call on storage that is known: a shallow copy, as
/// `torch::zeros` returns one, `tensor.data()`, or a view of a parameter or buffer made outside.
ValueId Tracer::find_alias(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.requires_grad()) return kUndefined;
  const OnStorage* on_storage = storages_.find(tensor.storage().unsafeGetStorageImpl());
  // `torch::tensor` copies shallowly and lets the original go.
  if (on_storage != nullptr && on_storage->offset == tensor.storage_offset() &&
      value(on_storage->id).meta == TensorMeta::of(tensor)) {
    const ValueId id = on_storage->id;
    bind(tensor, id);
    return id;
  }
  if (const at::Tensor other = on_storage != nullptr ? find_shallow_copy(tensor) : at::Tensor();
      other.defined()) {
    return derive(tensor, "aten::detach", {other});
  }
  const auto* entry = options_.table->find_storage(tensor);
  if (entry != nullptr && entry->tensor.scalar_type() == tensor.scalar_type()) {
    const at::NoGradGuard no_grad;
    return derive(tensor, "aten::as_strided",
                  {entry->tensor, tensor.sizes(), tensor.strides(), tensor.storage_offset()});
  }
  if (on_storage == nullptr && entry == nullptr) return kUndefined;
  refuse(
      "uses a tensor that shares memory with another one of the step but was not made from it by "
      "an operator (tensor.data() of a view, set_data, from_blob)",
      "Make it with an operator, such as detach() or as_strided()");
}

/// Takes `tensor` for the operator's result from known tensors.
ValueId Tracer::derive(const at::Tensor& tensor, const char* name, torch::jit::Stack arguments) {
  const UninterceptedScope own;
  call(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), arguments);
  const ValueId id = lookup(arguments[0].toTensor());
  bind(tensor, id);
  if (capture_ != nullptr) capture_->set_user(id, tensor);
  return id;
}

ValueId Tracer::define_from_table(const TensorTable::Entry& entry) {
  if (has_hooks(entry.tensor)) {
    refuse("uses " + std::string(graph::to_string(entry.kind)) + " \"" + entry.name +
               "\", which has a hook (register_hook) that would not run",
           "Gradients are complete when the step has returned: change them there, before "
           "optimizer.step()");
  }
  if (entry.tensor.requires_grad() && entry.tensor.is_leaf()) {
    ends_.push_back(torch::autograd::impl::grad_accumulator(entry.tensor));
  }
  Value value;
  value.kind = entry.kind;
  value.name = entry.name;
  value.meta = TensorMeta::of(entry.tensor);
  return add_value(std::move(value), entry.tensor);
}

ValueId Tracer::define_constant(const at::Tensor& tensor) {
  if (is_placeholder(tensor)) {
    refuse("uses a tensor that escaped from an earlier run of a step function (hidden state)",
           "What a microbatch leaves to the next one is a buffer: register it in the module and "
           "write it in place (state.copy_(h.detach())). What a step leaves to the next may also "
           "be returned from the step and passed in as an argument");
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
    if (capture_ != nullptr && overlap(entry.tensor, tensor)) {
      refuse("uses a tensor that shares memory with " + std::string(graph::to_string(entry.kind)) +
                 " \"" + entry.name + "\" but was not made from it by an operator (from_blob)",
             "Make it with an operator, such as detach() or as_strided()");
    }
  }
  check_may_be_constant(tensor);
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

/// Each microbatch would get the whole of it, without a word, where it is the batch.
void Tracer::check_may_be_constant(const at::Tensor& tensor) const {
  if (!options_.why_no_constant) return;
  const std::string why = options_.why_no_constant(tensor);
  if (why.empty()) return;
  const std::string reads = reading_ == nullptr
                                ? std::string("returns or differentiates")
                                : "calls operator " + reading_->schema().name() + " on";
  refuse(c10::str(reads, " a tensor ", tensor.scalar_type(), tensor.sizes(),
                  " that is none of its arguments, ", why),
         "If it is part of the batch, pass it to the step function as an argument, which is cut; "
         "if every microbatch needs the whole of it, say so where it is used, by "
         "smp::whole(tensor), or register it as a buffer of the module");
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

/// `requires_grad_()` and other ways to give a tensor a history by hand are no operators. The
/// former is captured as one, but for a parameter or buffer, which the step does not make.
bool Tracer::changed_by_hand(const at::Tensor& tensor, const Known& known) const {
  if (tensor.requires_grad() == known.requires_grad) return false;
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta != nullptr && meta->grad_fn_ != nullptr) {
    refuse(
        "uses a tensor that got a gradient history from no operator (" + meta->grad_fn_->name() +
            ")",
        "Write what made it with differentiable tensor operators, or make the module that makes it "
        "a leaf: smp::leaf(module)(x)");
  }
  const auto* entry = options_.table->find(tensor);
  if (entry == nullptr) return true;
  refuse(c10::str("changes ", graph::to_string(entry->kind), " \"", entry->name,
                  "\" by requires_grad_(", tensor.requires_grad() ? "true" : "false", ")"),
         "Freeze and unfreeze parameters before the step; weight.detach() gives a tensor that "
         "requires no gradient, and buffer.detach().requires_grad_() one that does");
}

}  // namespace smp::graph
