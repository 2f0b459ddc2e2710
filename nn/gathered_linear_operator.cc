// SPDX-License-Identifier: Apache-2.0
// smp::tp_gathered_linear: smp::tp_all_gather followed by aten::linear, as one operator that keeps
// this rank's part for its backward pass and gathers the whole again there (Korthikanti et al.,
// "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2).

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "core/check.h"
#include "nn/operator_call.h"
#include "nn/tensor_group.h"

namespace smp::nn {
namespace {

using at::Tensor;
using GatheredLinearCall = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                                  int64_t);

Tensor call_gathered_linear(const Tensor& x, const Tensor& weight,
                            const std::optional<Tensor>& bias, int64_t dim) {
  static const auto op = typed_operator<GatheredLinearCall>("smp::tp_gathered_linear");
  return op.call(x, weight, bias, dim);
}

Tensor all_gathered(const Tensor& x, int64_t dim) { return dispatched<kAllGather>(dim)(x); }

Tensor gathered_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                       int64_t dim) {
  SMP_CHECK_WITH(UsageError, dim >= 0 && dim < x.dim() - 1,
                 "smp::tp_gathered_linear: along dimension ", dim, " of a tensor of sizes ",
                 x.sizes(), ". Expected is a dimension before the last, which is that of channels");
  return at::linear(all_gathered(x, dim), weight, bias);
}

/// The group of the forward pass, in which the backward pass gathers and sums.
struct GroupOfCall : torch::CustomClassHolder {
  explicit GroupOfCall(comm::CommunicatorPtr group_of_call) : group(std::move(group_of_call)) {}

  const comm::CommunicatorPtr group;
};

/// Computes by the formula of aten::mm, which follows the layout of the weight.
Tensor gradient_of_weight(const Tensor& gradient, const Tensor& x, const Tensor& weight) {
  const Tensor conjugate = x.conj();
  return weight.is_contiguous() ? gradient.t().mm(conjugate) : conjugate.t().mm(gradient).t();
}

}  // namespace

/// Not in the unnamed namespace, since a backward pass that is split in two knows it by its name
/// (graph/split_backward.cc): gradients of the input and of the parameters are computed apart. All
/// are made of operators that can be differentiated again.
struct GatheredLinear : torch::autograd::Function<GatheredLinear> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& weight, const std::optional<Tensor>& bias, int64_t dim) {
    context->save_for_backward({x, weight});
    context->saved_data["dim"] = dim;
    context->saved_data["has_bias"] = bias.has_value() && bias->defined();
    context->saved_data["group"] =
        c10::IValue::make_capsule(c10::make_intrusive<GroupOfCall>(tensor_group()));
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_gathered_linear(x, weight, bias, dim);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const TensorGroupScope scope(
        c10::static_intrusive_pointer_cast<GroupOfCall>(context->saved_data["group"].toCapsule())
            ->group);
    const int64_t dim = context->saved_data["dim"].toInt();
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    // Reshapes to samples and positions as rows, which is how aten::linear computes.
    const Tensor gradient = gradients[0].reshape({-1, gradients[0].size(-1)});
    Tensor of_x, of_weight, of_bias;
    if (context->needs_input_grad(0)) {
      std::vector<int64_t> sizes = gradients[0].sizes().vec();
      sizes.back() = x.size(-1);
      of_x = dispatched<kReduceScatter>(dim)(gradient.mm(weight.conj()).view(sizes));
    }
    if (context->needs_input_grad(1)) {
      const Tensor whole = all_gathered(x, dim);
      of_weight = gradient_of_weight(gradient, whole.view({-1, whole.size(-1)}), weight);
    }
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2))
      of_bias = gradient.sum(0);
    return {of_x, of_weight, of_bias, Tensor()};
  }
};

namespace {

Tensor gathered_linear_autograd(const Tensor& x, const Tensor& weight,
                                const std::optional<Tensor>& bias, int64_t dim) {
  return GatheredLinear::apply(x, weight, bias, dim);
}

/// Casts as aten::linear does, so the gathered tensor has the lower precision.
template <c10::DispatchKey key, c10::DeviceType device>
Tensor gathered_linear_autocast(const Tensor& x, const Tensor& weight,
                                const std::optional<Tensor>& bias, int64_t dim) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(device);
  const auto cast = [&](const auto& tensor) {
    return at::autocast::cached_cast(type, tensor, device);
  };
  return call_gathered_linear(cast(x), cast(weight), cast(bias), dim);
}

TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def("tp_gathered_linear(Tensor x, Tensor weight, Tensor? bias, int dim) -> Tensor");
}

TORCH_LIBRARY_IMPL(smp, CompositeExplicitAutograd, m) {
  m.impl("tp_gathered_linear", &gathered_linear);
}

TORCH_LIBRARY_IMPL(smp, Autograd, m) { m.impl("tp_gathered_linear", &gathered_linear_autograd); }

TORCH_LIBRARY_IMPL(smp, AutocastCPU, m) {
  m.impl("tp_gathered_linear", &gathered_linear_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>);
}

TORCH_LIBRARY_IMPL(smp, AutocastCUDA, m) {
  m.impl("tp_gathered_linear",
         &gathered_linear_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>);
}

}  // namespace
}  // namespace smp::nn
