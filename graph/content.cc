// SPDX-License-Identifier: Apache-2.0
#include "graph/content.h"

#include <ATen/ScalarOps.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/check.h"
#include "graph/memory_layout.h"

namespace smp::graph {

namespace {

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor._is_zerotensor() &&
         !tensor.is_conj() && !tensor.is_neg();
}

/// The elements one after the other, on the CPU.
at::Tensor flat_copy(const at::Tensor& tensor) {
  if (tensor._is_zerotensor())
    return at::zeros(tensor.sizes(), at::device(at::kCPU).dtype(tensor.dtype()));
  return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
}

}  // namespace

uint64_t hash_content(const at::Tensor& tensor, uint64_t seed) {
  if (is_plain_memory(tensor)) return XXH64(tensor.const_data_ptr(), tensor.nbytes(), seed);
  at::NoGradGuard no_grad;
  const at::Tensor flat = flat_copy(tensor);
  return XXH64(flat.const_data_ptr(), flat.nbytes(), seed);
}

namespace {

/// Elements that are summed at once: intermediate results take 8 bytes each.
constexpr int64_t kSummed = 1 << 22;
constexpr int64_t kOdd = static_cast<int64_t>(0x9e3779b97f4a7c15ull);
constexpr int64_t kOther = static_cast<int64_t>(0xbf58476d1ce4e5b9ull);

/// The elements as numbers of their bits, one after the other.
at::Tensor bits_of(const at::Tensor& tensor) {
  at::Tensor real = tensor.detach().resolve_conj().resolve_neg();
  if (real._is_zerotensor()) real = at::zeros(real.sizes(), real.options());
  if (real.is_complex()) real = at::view_as_real(real);
  constexpr std::array<at::ScalarType, 4> kIntegers = {at::kChar, at::kShort, at::kInt, at::kLong};
  for (const at::ScalarType type : kIntegers) {
    if (real.itemsize() == c10::elementSize(type)) return real.contiguous().view(type).flatten();
  }
  SMP_INTERNAL_ASSERT(false, "elements of ", real.itemsize(), " bytes");
}

/// Odd numbers without a pattern, so that a difference is not multiplied to 0.
at::Tensor weights_of(int64_t count, at::Device device) {
  at::Tensor weights = at::arange(count, at::device(device).dtype(at::kLong)).mul_(kOdd);
  weights.bitwise_xor_(weights.bitwise_right_shift(32)).mul_(kOther);
  return weights.bitwise_xor_(weights.bitwise_right_shift(29)).bitwise_or_(1);
}

/// Checksums of tensors on one device.
std::vector<uint64_t> checksums(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return {};
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sums, bits;
  int64_t longest = 1;
  for (const at::Tensor& tensor : tensors) {
    bits.push_back(bits_of(tensor));
    longest = std::max(longest, std::min(bits.back().numel(), kSummed));
  }
  const at::Tensor weights = weights_of(longest, bits.front().device());
  for (const at::Tensor& some : bits) {
    at::Tensor sum = at::zeros({}, weights.options());
    for (int64_t begin = 0; begin < some.numel(); begin += kSummed) {
      const int64_t count = std::min(kSummed, some.numel() - begin);
      sum.mul_(kOdd).add_((some.narrow(0, begin, count) * weights.narrow(0, 0, count)).sum());
    }
    sums.push_back(sum);
  }
  const at::Tensor host = at::stack(sums).cpu();
  const auto* first = host.const_data_ptr<int64_t>();
  return {first, first + host.numel()};
}

}  // namespace

std::vector<uint64_t> hashes_in_place(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> elsewhere;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cpu()) elsewhere.push_back(tensor);
  }
  const std::vector<uint64_t> sums = checksums(elsewhere);
  std::vector<uint64_t> hashes;
  auto next = sums.begin();
  for (const at::Tensor& tensor : tensors) {
    hashes.push_back(tensor.is_cpu() ? hash_content(tensor) : *next++);
  }
  return hashes;
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
  const at::NoGradGuard no_grad;
  const bool is_memory = tensor.has_storage() && !tensor._is_zerotensor() && !tensor.is_quantized();
  const at::Tensor content = is_memory ? copy_as_laid_out(tensor) : tensor.detach().clone();
  stay_wrapped_number(tensor, content);
  return content;
}

bool is_wrapped_number(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

/// Calls no operator, since a step function may do so.
at::Tensor wrapped_number(const at::Scalar& number) {
  at::Tensor tensor = c10::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

void stay_wrapped_number(const at::Tensor& from, const at::Tensor& to) {
  if (is_wrapped_number(from)) to.unsafeGetTensorImpl()->set_wrapped_number(true);
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
    without_expansion(tensor).copy_(kept.content);
  }
}

void ContentScope::keep(const at::Tensor& tensor) {
  auto& kept = kept_[tensor.unsafeGetTensorImpl()];
  if (kept.tensor.defined()) return;
  kept = {tensor, without_expansion(tensor.detach()).clone(), tensor.requires_grad()};
}

void mark_uninitialised(const at::Tensor& tensor) {
  constexpr int kPattern = 0xA5;
  if (!tensor.is_cpu() || tensor.numel() == 0) return;
  std::memset(tensor.mutable_data_ptr(), kPattern, tensor.storage().nbytes());
}

}  // namespace smp::graph
