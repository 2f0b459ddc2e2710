// SPDX-License-Identifier: Apache-2.0
// The operators that move tensors between the ranks of a tensor-parallel group. Each is a linear
// map, and its gradient's formula is another one of them.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <functional>
#include <utility>
#include <vector>

#include "core/check.h"
#include "nn/operator_call.h"
#include "nn/tensor_group.h"

namespace smp::nn {
namespace {

using at::Tensor;

// ---------------------------------------------------------------------------------------------
// Kernels, of any device; on the meta device they give shapes. Results are contiguous, but for that
// of `tp_copy`, which is a view.

Tensor copy(const Tensor& x) { return at::alias(x); }

/// The form in which a complex tensor is sent: communicators know real numbers.
Tensor as_real(const Tensor& x) { return x.is_complex() ? at::view_as_real(x) : x; }

Tensor reduce(const Tensor& x) {
  const auto group = tensor_group();
  const Tensor result = x.clone(at::MemoryFormat::Contiguous);
  if (!x.is_meta()) group->all_reduce(as_real(result));
  return result;
}

Tensor scatter(const Tensor& x, int64_t dim, int64_t blocks) {
  const auto group = tensor_group();
  return split_of_whole(x, dim, blocks, group->size()).part(x, group->rank());
}

Tensor gather(const Tensor& x, int64_t dim, int64_t blocks) {
  const auto group = tensor_group();
  const ParameterSplit split = split_of_part(x, dim, blocks, group->size());
  if (x.is_meta()) return at::empty(split.sizes, x.options());
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.insert(sizes.begin(), group->size());
  const Tensor parts = at::empty(sizes, x.options());
  group->all_gather(as_real(parts), as_real(x.resolve_conj().contiguous()));
  return dim == 0 && blocks == 1 ? parts.view(split.sizes) : split.join(parts.unbind(0));
}

/// The parts of `x` along `dim`, one after the other: [ranks, sizes of a part].
Tensor parts_along(const Tensor& x, int64_t dim, int ranks) {
  const Tensor parts = x.unflatten(dim, {ranks, x.size(dim) / ranks}).movedim(dim, 0);
  return parts.resolve_conj().contiguous();
}

Tensor all_gather(const Tensor& x, int64_t dim) { return gather(x, dim, /*blocks=*/1); }

Tensor reduce_scatter(const Tensor& x, int64_t dim) {
  const auto group = tensor_group();
  const ParameterSplit split = split_of_whole(x, dim, /*blocks=*/1, group->size());
  const Tensor result = at::empty(split.local_sizes(), x.options());
  if (!x.is_meta()) {
    group->reduce_scatter(as_real(result), as_real(parts_along(x, dim, group->size())));
  }
  return result;
}

Tensor all_to_all(const Tensor& x, int64_t split_dim, int64_t join_dim) {
  const auto group = tensor_group();
  split_of_whole(x, split_dim, /*blocks=*/1, group->size());
  normal_dim("smp::tp_all_to_all", x, join_dim);
  const Tensor sent = parts_along(x, split_dim, group->size());
  const Tensor received = at::empty_like(sent);
  if (!x.is_meta()) group->all_to_all(as_real(received), {}, as_real(sent), {});
  return at::cat(received.unbind(0), join_dim);
}

// ---------------------------------------------------------------------------------------------
// Gradients

using Map = std::function<Tensor(const Tensor&)>;

/// The data that a node of the history needs for its backward pass.
struct Adjoint : torch::CustomClassHolder {
  Adjoint(Map map_of_gradient, comm::CommunicatorPtr group_of_call)
      : map(std::move(map_of_gradient)), group(std::move(group_of_call)) {}

  const Map map;
  const comm::CommunicatorPtr group;
};

/// A linear map, and the one that its gradient goes through.
struct LinearMap : torch::autograd::Function<LinearMap> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Map& map,
                        const Map& adjoint) {
    context->saved_data["adjoint"] =
        c10::IValue::make_capsule(c10::make_intrusive<Adjoint>(adjoint, tensor_group()));
    const at::AutoDispatchBelowADInplaceOrView below;
    return map(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto adjoint =
        c10::static_intrusive_pointer_cast<Adjoint>(context->saved_data["adjoint"].toCapsule());
    const TensorGroupScope scope(adjoint->group);
    return {adjoint->map(gradients[0]), Tensor(), Tensor()};
  }
};

/// `tp_copy` returns its argument, which libtorch turns into a view. Autograd refuses to write such
/// a view in place, since the gradient of the old value would be lost.
struct Copy : torch::autograd::Function<Copy> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Map& adjoint) {
    context->saved_data["adjoint"] =
        c10::IValue::make_capsule(c10::make_intrusive<Adjoint>(adjoint, tensor_group()));
    return x;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {LinearMap::backward(context, gradients)[0], Tensor()};
  }
};

Tensor copy_autograd(const Tensor& x) { return Copy::apply(x, dispatched<kReduce>()); }

/// The gradient is whole and enters a divided region: tp_copy, of which only a second derivative
/// would see more than its argument.
Tensor reduce_autograd(const Tensor& x) {
  return LinearMap::apply(x, dispatched<kReduce>(), [](const Tensor& gradient) {
    return at::GradMode::is_enabled() ? dispatched<kCopy>()(gradient) : gradient;
  });
}

/// The gradient's formula is an operator with the same numbers.
template <const char* kName, const char* kAdjoint, class... Numbers>
Tensor map_autograd(const Tensor& x, Numbers... numbers) {
  return LinearMap::apply(x, dispatched<kName>(numbers...), dispatched<kAdjoint>(numbers...));
}

Tensor all_to_all_autograd(const Tensor& x, int64_t split_dim, int64_t join_dim) {
  return LinearMap::apply(x, dispatched<kAllToAll>(split_dim, join_dim),
                          dispatched<kAllToAll>(join_dim, split_dim));
}

TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def("tp_copy(Tensor(a) x) -> Tensor(a)");
  m.def("tp_reduce(Tensor x) -> Tensor");
  m.def("tp_scatter(Tensor x, int dim, int blocks) -> Tensor");
  m.def("tp_gather(Tensor x, int dim, int blocks) -> Tensor");
  m.def("tp_all_gather(Tensor x, int dim) -> Tensor");
  m.def("tp_reduce_scatter(Tensor x, int dim) -> Tensor");
  m.def("tp_all_to_all(Tensor x, int split_dim, int join_dim) -> Tensor");
}

TORCH_LIBRARY_IMPL(smp, CompositeExplicitAutograd, m) {
  m.impl("tp_copy", &copy);
  m.impl("tp_reduce", &reduce);
  m.impl("tp_scatter", &scatter);
  m.impl("tp_gather", &gather);
  m.impl("tp_all_gather", &all_gather);
  m.impl("tp_reduce_scatter", &reduce_scatter);
  m.impl("tp_all_to_all", &all_to_all);
}

TORCH_LIBRARY_IMPL(smp, Autograd, m) {
  m.impl("tp_copy", &copy_autograd);
  m.impl("tp_reduce", &reduce_autograd);
  m.impl("tp_scatter", &map_autograd<kScatter, kGather, int64_t, int64_t>);
  m.impl("tp_gather", &map_autograd<kGather, kScatter, int64_t, int64_t>);
  m.impl("tp_all_gather", &map_autograd<kAllGather, kReduceScatter, int64_t>);
  m.impl("tp_reduce_scatter", &map_autograd<kReduceScatter, kAllGather, int64_t>);
  m.impl("tp_all_to_all", &all_to_all_autograd);
}

}  // namespace
}  // namespace smp::nn
