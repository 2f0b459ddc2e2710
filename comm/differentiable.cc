// SPDX-License-Identifier: Apache-2.0
#include "comm/differentiable.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/status.h"

namespace smp::comm {
namespace {

using at::Tensor;
using Map = std::function<Tensor(const Tensor&)>;

// The values of a tensor, one after the other.
Tensor dense(const Tensor& tensor) { return tensor.contiguous().resolve_conj().resolve_neg(); }

// The values that a node of the history needs for its backward pass.
struct Adjoint : torch::CustomClassHolder {
  Adjoint(const char* call_of_forward, Map map_of_gradient)
      : call(c10::str("backward of ", call_of_forward)), map(std::move(map_of_gradient)) {}

  const std::string call;
  const Map map;
};

// A linear map, and the one that its gradient goes through. The latter holds the group, since
// gradients of a device's tensors are computed on a thread of libtorch's, which is no rank's.
struct LinearMap : torch::autograd::Function<LinearMap> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& tensor,
                        const char* call, const Map& map, const Map& adjoint) {
    context->saved_data["adjoint"] =
        c10::IValue::make_capsule(c10::make_intrusive<Adjoint>(call, adjoint));
    return map(tensor);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto adjoint =
        c10::static_intrusive_pointer_cast<Adjoint>(context->saved_data["adjoint"].toCapsule());
    const core::CallScope here(adjoint->call, "", core::kOwnCollective);
    return {adjoint->map(gradients[0]), Tensor(), Tensor(), Tensor()};
  }
};

bool needs_gradient(const Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

Tensor apply(const char* call, const Tensor& tensor, const Map& map, const Map& adjoint) {
  return needs_gradient(tensor) ? LinearMap::apply(tensor, call, map, adjoint)
                                : map(tensor.detach());
}

// A copy of `given`, changed by `collective`.
Tensor on_copy(const Tensor& given, const std::function<void(const Tensor&)>& collective) {
  Tensor copy = given.clone(at::MemoryFormat::Contiguous);
  collective(copy);
  return copy;
}

// The ranks' tensors added up on rank `root`, zeros on the others: the adjoint of broadcast.
Tensor reduce(const CommunicatorPtr& group, const Tensor& tensor, int root) {
  const Map map = [group, root](const Tensor& given) {
    const Tensor sum = on_copy(given, [&](const Tensor& copy) { group->reduce(copy, root); });
    return group->rank() == root ? sum : at::zeros_like(sum);
  };
  return apply("reduce", tensor, map,
               [group, root](const Tensor& gradient) { return broadcast(group, gradient, root); });
}

}  // namespace

at::Tensor all_reduce(const CommunicatorPtr& group, const at::Tensor& tensor, ReduceOp op) {
  const Map map = [group, op](const Tensor& given) {
    return on_copy(given, [&](const Tensor& copy) { group->all_reduce(copy, op); });
  };
  return apply("all_reduce", tensor, map,
               [group, op](const Tensor& gradient) { return all_reduce(group, gradient, op); });
}

at::Tensor all_gather(const CommunicatorPtr& group, const at::Tensor& tensor) {
  const Map map = [group](const Tensor& given) {
    std::vector<int64_t> sizes = given.sizes().vec();
    sizes.insert(sizes.begin(), group->size());
    Tensor all = at::empty(sizes, given.options());
    group->all_gather(all, dense(given));
    return all;
  };
  return apply("all_gather", tensor, map, [group](const Tensor& gradient) {
    return reduce_scatter(group, gradient, ReduceOp::kSum);
  });
}

at::Tensor reduce_scatter(const CommunicatorPtr& group, const at::Tensor& tensor, ReduceOp op) {
  const Map map = [group, op](const Tensor& given) {
    Tensor row = at::empty(given.sizes().slice(1), given.options());
    group->reduce_scatter(row, dense(given), op);
    return row;
  };
  return apply("reduce_scatter", tensor, map, [group, op](const Tensor& gradient) {
    const Tensor all = all_gather(group, gradient);
    return op == ReduceOp::kAverage ? all / group->size() : all;
  });
}

at::Tensor all_to_all(const CommunicatorPtr& group, const at::Tensor& tensor) {
  const Map map = [group](const Tensor& given) {
    const Tensor sent = dense(given);
    Tensor received = at::empty_like(sent);
    group->all_to_all(received, {}, sent, {});
    return received;
  };
  return apply("all_to_all", tensor, map,
               [group](const Tensor& gradient) { return all_to_all(group, gradient); });
}

at::Tensor broadcast(const CommunicatorPtr& group, const at::Tensor& tensor, int root) {
  const Map map = [group, root](const Tensor& given) {
    return on_copy(given, [&](const Tensor& copy) { group->broadcast(copy, root); });
  };
  return apply("broadcast", tensor, map,
               [group, root](const Tensor& gradient) { return reduce(group, gradient, root); });
}

void check_needs_no_gradient(const std::string& call, const char* reason,
                             const at::Tensor& tensor) {
  SMP_CHECK_WITH(UsageError, !tensor.defined() || !needs_gradient(tensor), call,
                 ": the tensor of shape ", tensor.sizes(), " requires a gradient, and ", reason,
                 ", so that it would be lost. Pass detach() of the tensor, or make the call under "
                 "torch::NoGradGuard, where no gradient is wanted");
}

}  // namespace smp::comm
