// SPDX-License-Identifier: Apache-2.0
// Operators that a step function may not call, or not with its arguments.

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <algorithm>

#include "graph/capture.h"
#include "graph/differentiate.h"
#include "graph/grad_shapes.h"
#include "graph/layout.h"
#include "graph/operator_traits.h"
#include "graph/tracer.h"

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

}  // namespace

void Tracer::refuse_replaced_storage(const std::string& name) const {
  if (!has_trait(name, OperatorTrait::kReplacesStorage)) return;
  refuse("operator " + name + " replaces the storage of a tensor (set_data, resize_)",
         "Make a new tensor instead, or make the module that does it a leaf: smp::leaf(module)(x)");
}

/// The one module of libtorch that reads its state in `forward`: in training, without a momentum.
void Tracer::refuse_cumulative_average(const at::Tensor& read) const {
  if (!read.defined()) return;
  const auto* entry = options_.table->find_storage(read);
  if (entry == nullptr || !c10::ends_with(entry->name, "num_batches_tracked")) return;
  refuse(
      "buffer \"" + entry->name +
          "\" is read on the host, as BatchNorm without a momentum does to average by the number "
          "of batches",
      "Give it a momentum (BatchNorm1dOptions(n).momentum(0.1)), or make it a leaf, which each "
      "microbatch calls: smp::leaf(norm)(x)");
}

/// Operators that make a tensor itself another view of its memory. Registered tensors outlive the
/// run, and the next microbatch would find the view that this one made.
void Tracer::refuse_views_in_place(const TracedCall& call) const {
  const std::string& name = call.op->schema().name();
  if (!call.op->hasTag(at::Tag::inplace_view)) return;
  if (has_trait(name, OperatorTrait::kCutsHistory)) return;  // `detach_` leaves the shape
  const auto* entry = options_.table->find(call.tensors[0]);
  if (entry != nullptr) refuse_new_shape(name, *entry);
}

/// The same for a tensor that has a new shape afterwards, as an `out=` may.
void Tracer::check_keeps_shape(const TracedCall& call, const at::Tensor& argument,
                               const at::Tensor& result) const {
  if (argument.sizes() == result.sizes() && argument.strides() == result.strides()) return;
  const auto* entry = options_.table->find(argument);
  if (entry != nullptr) refuse_new_shape(call.op->schema().name(), *entry);
}

void Tracer::refuse_new_shape(const std::string& name, const TensorTable::Entry& entry) const {
  refuse(
      c10::str("operator ", name, " changes the shape of ", graph::to_string(entry.kind), " \"",
               entry.name, "\" in place"),
      "Use the operator that returns a view of it (unsqueeze in place of unsqueeze_), and let an "
      "out= have the shape of the result; what is registered gets its shape outside the step "
      "function");
}

/// A view of memory that its argument does not show.
void Tracer::refuse_views_beyond(const TracedCall& call) {
  const int index = storage_offset_argument(call.op->schema());
  if (index < 0 || call.ids[0] == kUndefined) return;
  if (options_.table->find(call.tensors[0]) != nullptr) return;
  const at::Tensor& argument = capture_->concrete(call.ids[0]);
  const auto sizes = call.arguments[index - 2].constant.toIntVector();
  const auto strides = call.arguments[index - 1].constant.toIntVector();
  const bool elsewhere = !call.arguments[index].constant.isNone() ||
                         (call.absolute_offset && argument.storage_offset() != 0);
  if (!elsewhere && span_of(sizes, strides) <= span_of(argument.sizes(), argument.strides())) {
    return;
  }
  refuse("operator " + call.op->schema().name() +
             " reaches elements of the storage that its argument does not show, which may lie on "
             "another rank or in another microbatch",
         "Use slice(), narrow() or select() of the tensor that shows them");
}

void Tracer::refuse_grad_through_leaf(const TracedCall& call) {
  if (!(*call.op == grad_operator())) return;
  const std::string leaf = leaf_on_the_way(capture_->graph(), call.arguments);
  if (leaf.empty()) return;
  refuse("autograd::grad goes back through leaf module \"" + leaf +
             "\", whose operators are not part of the graph",
         "Call autograd::grad inside the leaf, or let the module be captured");
}

/// TorchScript's interpreter calls the function's operators in its first run. Later it gives them a
/// backward of its own, and may join them. Does nothing where none was called.
void Tracer::refuse_torch_script() const {
  if (script_operator_.empty()) return;
  refuse("operator " + script_operator_ +
             " is called by a TorchScript function, whose backward is not made of operators",
         "Write the function with libtorch's operators, or make the module that calls it a leaf: "
         "smp::leaf(module)(x)");
}

void Tracer::refuse_unsupported(const TracedCall& call) {
  const auto& schema = call.op->schema();
  const std::string& name = schema.name();
  refuse_replaced_storage(name);
  refuse_views_in_place(call);
  refuse_views_beyond(call);
  refuse_grad_through_leaf(call);
  for (const Argument& argument : call.arguments) {
    if (argument.kind == Argument::Kind::kConstant && argument.constant.isGenerator()) {
      refuse("operator " + name + " draws from an explicit generator",
             "Leave the generator out: random operators of a step draw from streams keyed by the "
             "configuration's \"seed\", the step and the microbatch");
    }
  }
  if (has_shape_of_data(call)) {
    refuse("the result shape of operator " + name + " depends on data",
           "Use an operator whose result has a fixed shape (torch::where, a mask that multiplies), "
           "or make the module that calls it a leaf: smp::leaf(module)(x)");
  }
}

}  // namespace smp::graph
