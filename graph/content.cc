// SPDX-License-Identifier: Apache-2.0
#include "graph/content.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <xxhash.h>

#include <cstring>

namespace smp::graph {

namespace {

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor._is_zerotensor();
}

/// The elements one after the other, on the CPU.
at::Tensor flat_copy(const at::Tensor& tensor) {
  if (tensor._is_zerotensor())
    return at::zeros(tensor.sizes(), at::device(at::kCPU).dtype(tensor.dtype()));
  return tensor.detach().cpu().contiguous();
}

}  // namespace

uint64_t hash_content(const at::Tensor& tensor, uint64_t seed) {
  if (is_plain_memory(tensor)) return XXH64(tensor.const_data_ptr(), tensor.nbytes(), seed);
  at::NoGradGuard no_grad;
  const at::Tensor flat = flat_copy(tensor);
  return XXH64(flat.const_data_ptr(), flat.nbytes(), seed);
}

bool same_content(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (is_plain_memory(a) && is_plain_memory(b)) {
    return a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
  }
  return hash_content(a) == hash_content(b);
}

bool is_small_on_cpu(const TensorMeta& meta) {
  constexpr int64_t kSmallBytes = 1 << 12;
  return meta.device.is_cpu() && meta.nbytes() <= kSmallBytes;
}

at::Tensor clone_content(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  const at::Tensor content = tensor.detach().clone();
  // A number that libtorch wrapped into a tensor does not decide the type of what it is added to.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    content.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return content;
}

ContentScope::ContentScope(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) keep(tensor);
}

ContentScope::~ContentScope() {
  const at::NoGradGuard no_grad;
  for (const auto& [impl, kept] : kept_) {
    const at::Tensor& tensor = kept.tensor;
    const bool has_history = tensor.requires_grad() && !kept.requires_grad;
    // detach_() would refuse views.
    if (has_history) tensor.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
    tensor.copy_(kept.content);
  }
}

void ContentScope::keep(const at::Tensor& tensor) {
  auto& kept = kept_[tensor.unsafeGetTensorImpl()];
  if (!kept.tensor.defined()) kept = {tensor, clone_content(tensor), tensor.requires_grad()};
}

void mark_uninitialised(const at::Tensor& tensor) {
  constexpr int kPattern = 0xA5;
  if (!tensor.is_cpu() || tensor.numel() == 0) return;
  std::memset(tensor.mutable_data_ptr(), kPattern, tensor.storage().nbytes());
}

}  // namespace smp::graph
