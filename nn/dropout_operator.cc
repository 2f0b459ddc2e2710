// SPDX-License-Identifier: Apache-2.0
// smp::tp_dropout.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/native_dropout_backward.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "core/check.h"
#include "nn/operator_call.h"
#include "nn/tensor_group.h"

namespace smp::nn {
namespace {

using at::Tensor;

/// Draws as aten::dropout on the CPU: 0 or 1 / (1 - p) for each element of the whole.
Tensor noise_of_whole(const ParameterSplit& split, const Tensor& x, double p) {
  const Tensor noise = at::empty(split.sizes, x.options());
  return x.is_meta() ? noise : noise.bernoulli_(1 - p);
}

/// Computes as aten::dropout on a GPU, which takes a kernel of its own and multiplies in its order.
Tensor fused_dropout(const ParameterSplit& split, int rank, const Tensor& x, double p) {
  Tensor mask;
  {
    const at::NoGradGuard no_grad;
    mask = std::get<1>(at::native_dropout(at::empty(split.sizes, x.options()), p, true));
    mask = split.part(mask, rank);
  }
  return at::native_dropout_backward(x, mask, 1 / (1 - p));
}

Tensor dropout(const Tensor& x, double p, bool train, int64_t dim, int64_t blocks) {
  SMP_CHECK_WITH(UsageError, p >= 0 && p <= 1,
                 "smp::tp_dropout: a probability between 0 and 1 was expected, got ", p);
  const auto group = tensor_group();
  const ParameterSplit split = split_of_part(x, dim, blocks, group->size());
  if (!train || p == 0 || x.numel() == 0) return x.clone();
  if (p == 1) return x.mul(at::zeros({}, x.options()));
  if (x.is_cuda()) return fused_dropout(split, group->rank(), x, p);
  Tensor noise;
  {
    const at::NoGradGuard no_grad;
    noise = split.part(noise_of_whole(split, x, p), group->rank()).div_(1 - p);
  }
  return x.mul(noise);
}

TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def("tp_dropout(Tensor x, float p, bool train, int dim, int blocks) -> Tensor",
        {at::Tag::nondeterministic_seeded});
}

// Its history is that of the multiplication inside.
TORCH_LIBRARY_IMPL(smp, CompositeImplicitAutograd, m) { m.impl("tp_dropout", &dropout); }

}  // namespace
}  // namespace smp::nn
