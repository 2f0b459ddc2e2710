// SPDX-License-Identifier: Apache-2.0
#include "graph/not_equal.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "core/check.h"

namespace smp::graph {
namespace {

at::Tensor not_equal(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_meta() && a.equal(b)) {
    core::fail<CaptureError>(
        "torch::equal was called on two tensors of shape ", a.sizes(),
        " that are equal in this microbatch. A step is captured as a graph of operators, and this "
        "one as the program runs where they differ, so what it does cannot depend on it. Pass the "
        "very same tensor where they are meant to be one, as attention(x, x, x) does, or make the "
        "module that calls it a leaf: smp::leaf(module)(x)");
  }
  return at::empty({0}, a.options().dtype(at::kByte).requires_grad(false));
}

TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def("not_equal(Tensor a, Tensor b) -> Tensor");
  m.impl("not_equal", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &not_equal));
  m.impl("not_equal",
         torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
}

}  // namespace

const c10::OperatorHandle& not_equal_operator() {
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow("smp::not_equal", "");
  return handle;
}

}  // namespace smp::graph
