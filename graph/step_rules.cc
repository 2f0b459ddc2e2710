// SPDX-License-Identifier: Apache-2.0
#include "graph/step_rules.h"

#include <c10/util/string_view.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "graph/capture.h"
#include "graph/differentiate.h"
#include "graph/grad_shapes.h"
#include "graph/memory_layout.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"

namespace smp::graph {
namespace {

/// Whether the shapes of the results depend on data. libtorch says it of most such operators, and
/// of some calls of which it is not true.
bool has_shape_of_data(const TracedCall& call) {
  const auto& schema = call.op->schema();
  const std::string& name = schema.name();
  if (name == "aten::nonzero_numpy") return true;
  if (name == "aten::tensor_split") return schema.overload_name() == "tensor_indices_or_sections";
  if (name == "aten::repeat_interleave") {
    const bool counts = schema.overload_name() != "self_int";
    return counts && call.arguments.back().constant.isNone();  // output_size
  }
  if (!call.op->hasTag(at::Tag::dynamic_output_shape)) return false;
  if (name == "aten::index") {
    return std::any_of(call.tensors.begin() + 1, call.tensors.end(), [](const at::Tensor& index) {
      return index.defined() &&
             (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
    });
  }
  // Given the number of classes, its result has a shape that follows.
  return name != "aten::one_hot" || call.arguments[1].constant.toInt() < 0;
}

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

void check_storage_stays(const std::string& name, const Location& location) {
  if (!has_trait(name, OperatorTrait::kReplacesStorage)) return;
  location.refuse(
      "operator " + name + " replaces the storage of a tensor (set_data, resize_)",
      "Make a new tensor instead, or make the module that does it a leaf: smp::leaf(module)(x)");
}

/// The call makes the tensor itself another view of its memory. Registered tensors outlive the run,
/// and the next microbatch would find the view that this one made.
void check_not_registered(const TracedCall& call, const at::Tensor& tensor,
                          const Location& location) {
  const auto* entry = location.table().find(tensor);
  if (entry == nullptr) return;
  location.refuse(
      c10::str("operator ", call.op->schema().name(), " changes the shape of ",
               graph::to_string(entry->kind), " \"", entry->name, "\" in place"),
      "Use the operator that returns a view of it (unsqueeze in place of unsqueeze_), and let an "
      "out= have the shape of the result; what is registered gets its shape outside the step "
      "function");
}

/// A view of memory that its argument does not show.
void check_views_beyond(const TracedCall& call, Capture& capture, const Location& location) {
  const int index = storage_offset_argument(call.op->schema());
  if (index < 0 || call.ids[0] == kUndefined) return;
  if (location.table().find(call.tensors[0]) != nullptr) return;
  const at::Tensor& argument = capture.concrete(call.ids[0]);
  const auto sizes = call.arguments[index - 2].constant.toIntVector();
  const auto strides = call.arguments[index - 1].constant.toIntVector();
  const bool elsewhere = !call.arguments[index].constant.isNone() ||
                         (call.absolute_offset && argument.storage_offset() != 0);
  if (!elsewhere && span_of(sizes, strides) <= span_of(argument.sizes(), argument.strides())) {
    return;
  }
  location.refuse(
      "operator " + call.op->schema().name() +
          " reaches elements of the storage that its argument does not show, which may lie on "
          "another rank or in another microbatch",
      "Use slice(), narrow() or select() of the tensor that shows them");
}

void check_grad_past_leaves(const TracedCall& call, const Capture& capture,
                            const Location& location) {
  if (!(*call.op == grad_operator())) return;
  const std::string leaf = leaf_on_the_way(capture.graph(), call.arguments);
  if (leaf.empty()) return;
  location.refuse("autograd::grad goes back through leaf module \"" + leaf +
                      "\", whose operators are not part of the graph",
                  "Call autograd::grad inside the leaf, or let the module be captured");
}

/// The one module of libtorch that reads its state in `forward`: in training, without a momentum.
void check_no_cumulative_average(const at::Tensor& read, const Location& location) {
  if (!read.defined()) return;
  const auto* entry = location.table().find_storage(read);
  if (entry == nullptr || !c10::ends_with(entry->name, "num_batches_tracked")) return;
  location.refuse(
      "buffer \"" + entry->name +
          "\" is read on the host, as BatchNorm without a momentum does to average by the number "
          "of batches",
      "Give it a momentum (BatchNorm1dOptions(n).momentum(0.1)), or make it a leaf, which each "
      "microbatch calls: smp::leaf(norm)(x)");
}

/// Each microbatch would get the whole of it, without a word, where it is the batch.
void check_may_be_constant(const at::Tensor& tensor, const c10::OperatorHandle* op,
                           const TraceOptions& options, const Location& location) {
  if (!options.why_no_constant) return;
  const core::Refusal refusal = options.why_no_constant(tensor);
  if (!refusal) return;
  const std::string reads = op == nullptr ? std::string("returns or differentiates")
                                          : "calls operator " + op->schema().name() + " on";
  location.refuse(
      c10::str(reads, " a tensor ", tensor.scalar_type(), tensor.sizes(),
               " that is none of its arguments, ", *refusal),
      "If it is part of the batch, pass it to the step function as an argument, which is cut; "
      "if every microbatch needs the whole of it, say so where it is used, by "
      "smp::whole(tensor), or register it as a buffer of the module");
}

}  // namespace

void check_call(const TracedCall& call, Capture& capture, const Location& location) {
  const auto& schema = call.op->schema();
  const std::string& name = schema.name();
  check_storage_stays(name, location);
  const bool same_shape = has_trait(name, OperatorTrait::kCutsHistory);  // `detach_`
  if (call.op->hasTag(at::Tag::inplace_view) && !same_shape) {
    check_not_registered(call, call.tensors[0], location);
  }
  check_views_beyond(call, capture, location);
  check_grad_past_leaves(call, capture, location);
  for (const Argument& argument : call.arguments) {
    if (argument.kind == Argument::Kind::kConstant && argument.constant.isGenerator()) {
      location.refuse(
          "operator " + name + " draws from an explicit generator",
          "Leave the generator out: random operators of a step draw from streams keyed by the "
          "configuration's \"seed\", the step and the microbatch");
    }
  }
  if (has_shape_of_data(call)) {
    location.refuse(
        "the result shape of operator " + name + " depends on data",
        "Use an operator whose result has a fixed shape (torch::where, a mask that multiplies), "
        "or make the module that calls it a leaf: smp::leaf(module)(x)");
  }
}

/// An `out=` may have a new shape afterwards.
void check_shape(const TracedCall& call, const at::Tensor& argument, const at::Tensor& result,
                 const Location& location) {
  if (argument.sizes() == result.sizes() && argument.strides() == result.strides()) return;
  check_not_registered(call, argument, location);
}

void check_writes(const Operator& op, const Capture& capture, const Location& location) {
  for (int alias_set : op.writes) {
    const Value& base = capture.base(alias_set);
    if (base.kind == ValueKind::kParameter && !is_leaf(op.handle)) {
      location.refuse(
          "operator " + op.name() + " writes parameter \"" + base.name + "\"",
          "Parameters may be changed outside the step function only: call optimizer.step() "
          "after the step has returned");
    }
    if (base.kind == ValueKind::kConstant) {
      location.refuse(
          "operator " + op.name() +
              " writes a tensor that was made outside the step function and is not registered "
              "(hidden state)",
          "Register it as a buffer of the module");
    }
  }
}

void refuse_host_read(const std::string& name, const std::vector<at::Tensor>& tensors,
                      const Location& location) {
  check_storage_stays(name, location);
  for (const at::Tensor& read : tensors) check_no_cumulative_average(read, location);
  location.refuse(
      "operator " + name + " reads the data of a tensor on the host",
      "A step is captured as a graph of operators, so what it does cannot depend on data. Use "
      "tensor operators instead (torch::where, masks), return the tensor from the step and read "
      "it there, or make the module that needs the value a leaf: smp::leaf(module)(x)");
}

/// TorchScript's interpreter calls the function's operators in its first run. Later it gives them a
/// backward of its own, and may join them.
void check_torch_script(const std::string& name, const Location& location) {
  if (name.empty()) return;
  location.refuse(
      "operator " + name +
          " is called by a TorchScript function, whose backward is not made of operators",
      "Write the function with libtorch's operators, or make the module that calls it a leaf: "
      "smp::leaf(module)(x)");
}

void check_registered(const TensorTable::Entry& entry, const Location& location) {
  if (has_hooks(entry.tensor)) {
    location.refuse("uses " + std::string(graph::to_string(entry.kind)) + " \"" + entry.name +
                        "\", which has a hook (register_hook) that would not run",
                    "Gradients are complete when the step has returned: change them there, before "
                    "optimizer.step()");
  }
}

void check_constant(const at::Tensor& tensor, const c10::OperatorHandle* op, bool is_new,
                    const TraceOptions& options, const Location& location) {
  if (is_placeholder(tensor)) {
    location.refuse(
        "uses a tensor that escaped from an earlier run of a step function (hidden state)",
        "What a microbatch leaves to the next one is a buffer: register it in the module and "
        "write it in place (state.copy_(h.detach())). What a step leaves to the next may also "
        "be returned from the step and passed in as an argument");
  }
  if (tensor.requires_grad() && !tensor.is_leaf()) {
    location.refuse(
        "uses a tensor with a gradient history that was computed outside the step function (or on "
        "another thread)",
        "Compute it inside the step function on the calling thread, or pass tensor.detach()");
  }
  if (tensor.requires_grad()) {
    location.refuse(
        c10::str("uses a parameter of shape ", tensor.sizes(),
                 " that belongs to no DistributedModel"),
        "Register it in a module (register_parameter, register_module), assign it to the member "
        "before that, and wrap the module in a DistributedModel");
  }
  for (const auto& entry : location.table().entries()) {
    if (entry.tensor.grad().is_same(tensor)) {
      location.refuse("reads the gradient of parameter \"" + entry.name + "\"",
                      "Gradients are complete when the step has returned: read them there");
    }
    if (is_new && overlap(entry.tensor, tensor)) {
      location.refuse("uses a tensor that shares memory with " +
                          std::string(graph::to_string(entry.kind)) + " \"" + entry.name +
                          "\" but was not made from it by an operator (from_blob)",
                      "Make it with an operator, such as detach() or as_strided()");
    }
  }
  check_may_be_constant(tensor, op, options, location);
}

/// `requires_grad_()` and other ways to give a tensor a history by hand are no operators. The
/// former is captured as one, but for a parameter or buffer, which the step does not make.
void check_changed_by_hand(const at::Tensor& tensor, const Location& location) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta != nullptr && meta->grad_fn_ != nullptr) {
    location.refuse(
        "uses a tensor that got a gradient history from no operator (" + meta->grad_fn_->name() +
            ")",
        "Write what made it with differentiable tensor operators, or make the module that makes it "
        "a leaf: smp::leaf(module)(x)");
  }
  const auto* entry = location.table().find(tensor);
  if (entry == nullptr) return;
  location.refuse(
      c10::str("changes ", graph::to_string(entry->kind), " \"", entry->name,
               "\" by requires_grad_(", tensor.requires_grad() ? "true" : "false", ")"),
      "Freeze and unfreeze parameters before the step; weight.detach() gives a tensor that "
      "requires no gradient, and buffer.detach().requires_grad_() one that does");
}

}  // namespace smp::graph
