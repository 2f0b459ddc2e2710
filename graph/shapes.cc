// SPDX-License-Identifier: Apache-2.0
#include "graph/shapes.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "core/check.h"
#include "core/node.h"
#include "graph/content.h"
#include "graph/operator_traits.h"
#include "graph/random.h"
#include "graph/stack_tensors.h"
#include "graph/storage.h"

namespace smp::graph {
namespace {

/// The history of placeholders: none of them is a leaf, and none can be differentiated.
class PlaceholderNode : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    SMP_INTERNAL_ASSERT(false, "a backward pass went through a tensor that has no data");
  }
  std::string name() const override { return "smp::PlaceholderBackward"; }
};

/// One node serves all of a thread: the engine only ever reaches it to be refused.
const core::NodePtrTo<PlaceholderNode>& placeholder_node() {
  thread_local const core::NodePtrTo<PlaceholderNode> node = [] {
    auto made = core::make_node<PlaceholderNode>();
    // backward() without a gradient only passes a scalar on to the engine.
    at::AutoDispatchBelowADInplaceOrView guard;
    made->add_input_metadata(at::zeros({}));
    return made;
  }();
  return node;
}

void keep_nothing(void*) {}

/// The context of a placeholder's (empty) data pointer, by which it is known again.
void* placeholder_mark() {
  static int mark;
  return &mark;
}

/// The text of the error for reading the data of a placeholder. Every placeholder carries it, so
/// the text is put together once for all of a run.
const std::string& dataless_message(const std::string& step_name) {
  thread_local std::string named;
  thread_local std::string message;
  if (message.empty() || named != step_name) {
    named = step_name;
    message = c10::str(
        "[smp] the data of a tensor of step function \"", step_name,
        "\" was read where only its shape exists (by data_ptr, an accessor or printing). A step "
        "function runs to show which operators it "
        "calls: its tensors hold no data then, and none after it returned. Use what the step "
        "returns, or make the module that needs data, or that calls operators on another thread, a "
        "leaf: smp::leaf(module)(x)");
  }
  return message;
}

/// Takes the data of a storage away and marks it as a placeholder's.
void make_dataless(c10::StorageImpl& storage, const std::string& step_name) {
  take_data(storage, c10::DataPtr(nullptr, placeholder_mark(), &keep_nothing, storage.device()),
            dataless_message(step_name));
}

/// Whether another tensor has to stand for it where an operator runs on `device`. A tensor of the
/// CPU may be a number among those of another device.
bool is_elsewhere(const at::Tensor& tensor, at::Device device) {
  if (!tensor.defined()) return false;
  return tensor.is_meta() || (device.is_cpu() && !tensor.is_cpu());
}

/// True where autocast may choose the types: it does not know the meta device. Our own operators
/// are not made of others.
bool casts_automatically(const c10::OperatorHandle& op, at::DeviceType type) {
  if (!at::autocast::is_autocast_enabled(type)) return false;
  return op.operator_name().getNamespace() != "smp" && concerns_autocast(op, type);
}

at::Tensor to_filled(const at::Tensor& tensor, at::Device device, int fill) {
  if (!is_elsewhere(tensor, device)) return tensor;
  const at::Tensor filled = make_filled(TensorMeta::of(tensor), device, fill);
  stay_wrapped_number(tensor, filled);
  if (tensor.requires_grad()) give_placeholder_history(filled);
  return filled;
}

c10::IValue to_filled(const c10::IValue& value, at::Device device, int fill) {
  if (value.isDevice() && value.toDevice().is_meta()) return device;
  if (value.isGenerator()) {
    const at::Generator generator = value.toGenerator();
    return generator.device().type() == device.type() ? c10::IValue(generator.clone())
                                                      : c10::IValue();
  }
  return map_tensors(value,
                     [&](const at::Tensor& tensor) { return to_filled(tensor, device, fill); });
}

/// The part of `shape`'s memory that `result` shows of the memory for which it stands.
at::Tensor view_like(const at::Tensor& result, const at::Tensor& shape) {
  if (result.scalar_type() == shape.scalar_type()) {
    return shape.as_strided(result.sizes(), result.strides(), result.storage_offset());
  }
  at::AutoDispatchBelowADInplaceOrView guard;  // seen as another type: the real part
  const at::Tensor view =
      at::empty({0}, shape.options().dtype(result.scalar_type()))
          .set_(shape.storage(), result.storage_offset(), result.sizes(), result.strides())
          .variable_data();
  if (result.requires_grad()) give_placeholder_history(view);
  return view;
}

/// Repeats on the stand-in the changes that an operator made in place to `filled`, so that other
/// views of its memory show it, too: a new shape, and a history where there was none.
void follow_filled(const at::Tensor& filled, const at::Tensor& shape) {
  if (!filled.defined() || filled.is_same(shape)) return;
  if (filled.sizes() != shape.sizes() || filled.strides() != shape.strides()) {
    shape.as_strided_(filled.sizes(), filled.strides(), shape.storage_offset());
  }
  if (!filled.requires_grad() || shape.requires_grad()) return;
  TensorMeta number;
  number.requires_grad = true;
  shape.add_(make_shape_tensor(number));
}

/// No generator advances.
void call_on_filled(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                    torch::jit::Stack& stack, at::Device device, int fill) {
  stack.clear();
  for (const c10::IValue& value : arguments) stack.push_back(to_filled(value, device, fill));
  const std::vector<at::Tensor> shapes = tensors_in(arguments, arguments.size());
  const std::vector<at::Tensor> filled = tensors_in(stack, stack.size());
  if (is_random(op)) {
    call_seeded(op, stack, 0);  // the default generator stays where it is
  } else {
    op.callBoxed(stack);
  }
  for (size_t i = 0; i < filled.size(); ++i) follow_filled(filled[i], shapes[i]);
  for (c10::IValue& value : stack) {
    value = map_tensors(value,
                        [&](const at::Tensor& tensor) { return to_shape(tensor, filled, shapes); });
  }
}

}  // namespace

void give_placeholder_history(const at::Tensor& tensor) {
  torch::autograd::impl::set_gradient_edge(tensor, {placeholder_node(), 0});
}

void number_placeholder(const at::Tensor& tensor, uint32_t number) {
  auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta != nullptr && meta->grad_fn_ == placeholder_node()) meta->output_nr_ = number;
}

at::Tensor tensor_on(c10::Storage storage, const TensorMeta& meta, int64_t offset) {
  const c10::DispatchKey key = c10::computeDispatchKey(meta.dtype, std::nullopt, meta.device);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(meta.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes, meta.strides, offset);
  return tensor;
}

at::Tensor make_placeholder(const TensorMeta& meta, const std::string& step_name) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0,
      c10::DataPtr(nullptr, nullptr, &keep_nothing, meta.device), nullptr, false);
  make_dataless(*storage, step_name);
  const at::Tensor tensor = tensor_on(c10::Storage(std::move(storage)), meta);
  if (meta.requires_grad) give_placeholder_history(tensor);
  return tensor;
}

torch::autograd::Node& placeholder_history() { return *placeholder_node(); }

at::Tensor make_filled(const TensorMeta& meta, at::Device device, int fill) {
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor filled =
      at::empty_strided(meta.sizes, meta.strides, at::TensorOptions(meta.dtype).device(device));
  filled.fill_(fill);
  return filled.variable_data();
}

at::Tensor to_shape(const at::Tensor& result, const std::vector<at::Tensor>& filled,
                    const std::vector<at::Tensor>& shapes) {
  if (!result.defined() || !result.has_storage()) return result;  // sparse: the caller refuses it
  for (size_t i = 0; i < filled.size(); ++i) {
    if (filled[i].defined() && filled[i].is_same(result)) return shapes[i];
  }
  for (size_t i = 0; i < filled.size(); ++i) {
    if (filled[i].defined() && filled[i].storage().is_alias_of(result.storage())) {
      return view_like(result, shapes[i]);
    }
  }
  return make_shape_tensor(TensorMeta::of(result));
}

void follow_in_place(const at::Tensor& tensor, const TensorMeta& meta) {
  if (tensor.sizes() != c10::IntArrayRef(meta.sizes) ||
      tensor.strides() != c10::IntArrayRef(meta.strides)) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes, meta.strides);
  }
  if (tensor.requires_grad() == meta.requires_grad) return;
  if (meta.requires_grad) {
    give_placeholder_history(tensor);
  } else {
    torch::autograd::impl::set_gradient_edge(tensor, torch::autograd::Edge());
    tensor.unsafeGetTensorImpl()->set_requires_grad(false);  // a variable's flag
  }
}

void become_placeholder(const at::Tensor& tensor, const std::string& step_name) {
  make_dataless(*tensor.storage().unsafeGetStorageImpl(), step_name);
}

bool is_placeholder(const at::Tensor& tensor) {
  return tensor.has_storage() && is_placeholder(*tensor.storage().unsafeGetStorageImpl());
}

bool is_placeholder(c10::StorageImpl& storage) {
  return storage._mutable_data_ptr_no_checks().get_context() == placeholder_mark();
}

at::Tensor make_shape_tensor(const TensorMeta& meta) {
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor tensor =
      at::empty_strided(meta.sizes, meta.strides, at::TensorOptions(meta.dtype).device(at::kMeta))
          .variable_data();
  if (meta.requires_grad) give_placeholder_history(tensor);
  return tensor;
}

void call_on_shapes(const c10::OperatorHandle& op, torch::jit::Stack& stack, at::Device device) {
  const torch::jit::Stack arguments = stack;
  const auto run_on = [&](at::Device where) {
    on_zeros_or_ones(where, [&](int fill) { call_on_filled(op, arguments, stack, where, fill); });
  };
  const bool by_device = has_trait(op.schema().name(), OperatorTrait::kLaysOutByDevice) ||
                         casts_automatically(op, device.type());
  if (by_device) {
    run_on(device);
    return;
  }
  try {
    op.callBoxed(stack);
    return;
  } catch (const c10::Error&) {
  }
  try {
    run_on(at::kCPU);
  } catch (const c10::Error&) {  // no kernel, or none for such a type
    if (device.is_cpu()) throw;
    run_on(device);
  }
}

}  // namespace smp::graph
