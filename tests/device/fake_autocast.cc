// SPDX-License-Identifier: Apache-2.0
// Autocast on the fake device: libtorch's own lists of operators, cast as they are for CUDA.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

using at::DimnameList, at::IntArrayRef, at::Scalar, at::ScalarType,
    at::Tensor;  // names in the lists

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define FAKE_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FAKE_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FAKE_FLOAT32_IF_UNSET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define FAKE_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(FAKE_LOWER_PRECISION)
  AT_FORALL_FP32(FAKE_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FAKE_FLOAT32_IF_UNSET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(FAKE_WIDEST)
}

}  // namespace
