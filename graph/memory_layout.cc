// SPDX-License-Identifier: Apache-2.0
#include "graph/memory_layout.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace smp::graph {

int64_t span_of(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  int64_t span = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    span += (sizes[d] - 1) * strides[d];
  }
  return span;
}

bool overlaps_itself(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride and size
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return false;
    if (sizes[d] > 1) dimensions.emplace_back(strides[d], sizes[d]);
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t span = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride < span) return true;
    span += (size - 1) * stride;
  }
  return false;
}

int64_t shift_of(const at::Tensor& tensor) {
  constexpr uintptr_t kAlignment = 64;
  if (tensor.numel() == 0) return 0;
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return static_cast<int64_t>(address % kAlignment / tensor.itemsize());
}

MemoryLayout::MemoryLayout(const at::Tensor& tensor)
    : MemoryLayout(tensor.sizes(), tensor.strides(), tensor.options(), shift_of(tensor)) {
  conjugate = tensor.is_conj();
  negative = tensor.is_neg();
}

MemoryLayout::MemoryLayout(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                           const at::TensorOptions& options, int64_t shift)
    : sizes(sizes),
      strides(strides),
      options(options),
      span(span_of(sizes, strides)),
      shift(shift) {}

/// Avoids `at::empty`, which fills memory under deterministic algorithms: a graph that is captured
/// would fill it in each launch, after its inputs were written.
at::Tensor MemoryLayout::allocate() const {
  const at::Device device = options.device();
  if (device.is_cuda()) at::globalContext().lazyInitDevice(device.type());  // like at::empty
  const c10::DeviceGuard guard(device);
  const auto bytes = static_cast<size_t>(shift + span) * options.dtype().itemsize();
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::GetAllocator(device.type()),
                   /*resizable=*/true),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, std::nullopt, device)), options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, shift);
  tensor._set_conj(conjugate);
  tensor._set_neg(negative);
  return tensor;
}

at::Tensor MemoryLayout::flat(const at::Tensor& tensor) const {
  const at::NoGradGuard no_grad;
  const at::Tensor memory = tensor.detach();
  memory._set_conj(false);
  memory._set_neg(false);
  return at::as_strided(memory, {span}, {1});
}

int64_t MemoryLayout::nbytes() const {
  return span * static_cast<int64_t>(options.dtype().itemsize());
}

at::Tensor without_expansion(const at::Tensor& tensor) {
  at::Tensor result = tensor;
  if (tensor.layout() != at::kStrided) return result;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) result = result.narrow(d, 0, 1);
  }
  return result;
}

at::Tensor copy_as_laid_out(const at::Tensor& tensor) {
  const MemoryLayout layout(tensor);
  at::Tensor copy = layout.allocate();
  layout.flat(copy).copy_(layout.flat(tensor));
  return copy;
}

}  // namespace smp::graph
