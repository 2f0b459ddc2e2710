// SPDX-License-Identifier: Apache-2.0
#include "pipeline/message.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "graph/layout.h"
#include "pipeline/copy_stream.h"

namespace smp::pipeline {
namespace {

constexpr int64_t kAlignment = 64;

/// The first word of a tensor's header: what follows.
enum Content : int64_t {
  kUndefined,
  kElements,
  kZeros,  ///< a tensor without memory that backward passes make where a gradient is zero
};

Content content_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return kUndefined;
  return tensor._is_zerotensor() ? kZeros : kElements;
}

int64_t round_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Sizes with one element for every expanded dimension.
std::vector<int64_t> without_expansion(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<int64_t> result = sizes.vec();
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (strides[d] == 0 && sizes[d] > 1) result[d] = 1;
  }
  return result;
}

/// The tensor, as far as it shows each element once.
at::Tensor without_expansion(const at::Tensor& tensor) {
  const std::vector<int64_t> sizes = without_expansion(tensor.sizes(), tensor.strides());
  at::Tensor result = tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (sizes[d] < tensor.size(d)) result = result.narrow(d, 0, 1);
  }
  return result;
}

/// Strides without gaps in the same order of dimensions.
std::vector<int64_t> dense_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  const at::Tensor shape =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  return at::empty_like(shape, at::MemoryFormat::Preserve).strides().vec();
}

/// The elements as they lie, with these strides, which leave no gaps: what a device copies to the
/// host without help. A copy that gathers or negates is in part the host's work, which it does at
/// once, before the device has come to its part.
at::Tensor as_copied(const at::Tensor& tensor, at::IntArrayRef strides) {
  if (tensor.strides() == strides && !tensor.is_conj() && !tensor.is_neg()) return tensor;
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

/// A tensor as the sender's, which has no memory: times infinity it stays zero, as in one process.
at::Tensor zeros_of(const graph::TensorMeta& meta) {
  return at::_efficientzerotensor(meta.sizes,
                                  c10::TensorOptions().dtype(meta.dtype).device(meta.device));
}

/// Whether the receiver is to have the same gaps between elements: kernels take another way there.
/// A small part of a large tensor becomes dense instead, which would cost too much memory.
bool keeps_gaps(const at::Tensor& tensor) {
  constexpr int64_t kWorthwhile = 8;
  return graph::span_of(tensor.sizes(), tensor.strides()) <= kWorthwhile * tensor.numel();
}

}  // namespace

MessageLayout::MessageLayout(const std::vector<graph::TensorMeta>& metas) : metas_(metas) {
  int64_t words = 0;
  for (const auto& meta : metas_) {
    header_at_.push_back(words);
    words += 1 + static_cast<int64_t>(meta.sizes.size());
  }
  header_bytes_ = nbytes_ = round_up(words * static_cast<int64_t>(sizeof(int64_t)));
  for (const auto& meta : metas_) {
    if (device_.is_cpu()) device_ = meta.device;
    data_at_.push_back(nbytes_);
    nbytes_ += round_up(meta.nbytes());
  }
}

at::Tensor MessageLayout::make_buffer() const { return at::empty({nbytes_}, at::kByte); }

MessageLayout::Elements MessageLayout::elements_of(const at::Tensor& message,
                                                   const at::Tensor& device_part) const {
  if (device_part.defined()) return {device_part, header_bytes_};
  return {message, 0};
}

/// Whether tensors and elements are on two sides of the bus.
bool MessageLayout::crosses(const Elements& elements) const {
  return !device_.is_cpu() && elements.memory.is_cpu();
}

CopyStream& MessageLayout::copy_stream() const {
  if (!copy_stream_) copy_stream_ = std::make_shared<CopyStream>(device_);
  return *copy_stream_;
}

/// Made by hand: the dispatcher would cost more than many a message.
at::Tensor MessageLayout::view_of(const Elements& elements, size_t index, at::IntArrayRef sizes,
                                  at::IntArrayRef strides) const {
  const auto dtype = metas_[index].dtype;
  const at::Tensor& memory = elements.memory;
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(memory.storage()),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, std::nullopt, memory.device())),
      c10::scalarTypeToTypeMeta(dtype));
  const int64_t offset = memory.storage_offset() + data_at_[index] - elements.begin;
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides, offset / static_cast<int64_t>(elementSize(dtype)));
  return view;
}

/// A dense view of the message, or a copy of it on the tensor's device. Only a copy to a device may
/// end later.
at::Tensor MessageLayout::on_device(size_t index, const at::Tensor& view) const {
  const at::Device device = metas_[index].device;
  if (view.device() == device) return view;
  const at::Tensor copy =
      at::empty_strided(view.sizes(), view.strides(), view.options().device(device));
  return copy.copy_(view, /*non_blocking=*/!device.is_cpu());
}

/// A tensor of the message with the sender's strides: on the message's memory, or, where they leave
/// gaps or overlap or it is on another device, a copy.
at::Tensor MessageLayout::with_strides(const Elements& elements, size_t index,
                                       at::IntArrayRef strides) const {
  const at::IntArrayRef sizes = metas_[index].sizes;
  const at::Tensor view = view_of(elements, index, sizes, strides);
  // libtorch takes the offset of a complex tensor for one of real numbers when a view of its parts
  // is written, so one has memory of its own, as in one process.
  const bool on_message = !c10::isComplexType(metas_[index].dtype);
  if (on_message && view.is_non_overlapping_and_dense()) return on_device(index, view);
  // The strides may reach beyond the message, which has the elements without gaps.
  const at::Tensor compact = view_of(elements, index, without_expansion(sizes, strides), strides);
  if (on_message && compact.is_non_overlapping_and_dense()) {
    const at::Tensor moved = on_device(index, compact);
    return moved.is_same(compact) ? view : moved.as_strided(sizes, strides);
  }
  const at::Tensor packed =
      on_device(index, view_of(elements, index, compact.sizes(), dense_strides(compact)));
  const at::Tensor copy = at::empty_strided(compact.sizes(), compact.strides(), packed.options());
  return copy.copy_(packed).as_strided(sizes, strides);
}

/// Writes the elements and, into the header, the strides of one tensor.
void MessageLayout::copy_in(size_t index, const at::Tensor& tensor, const Elements& elements,
                            int64_t* words) const {
  if (tensor.is_cpu() && elements.memory.is_cpu() && tensor.is_non_overlapping_and_dense() &&
      !tensor.is_conj() && !tensor.is_neg()) {
    std::copy_n(tensor.strides().begin(), tensor.dim(), words);
    if (tensor.numel() > 0) {
      std::memcpy(elements.memory.mutable_data_ptr<uint8_t>() + data_at_[index],
                  tensor.const_data_ptr(), tensor.nbytes());
    }
    return;
  }
  at::NoGradGuard no_grad;
  const at::Tensor compact = without_expansion(tensor.detach());
  const std::vector<int64_t> dense = dense_strides(compact);
  const at::Tensor view = view_of(elements, index, compact.sizes(), dense);
  view.copy_(crosses(elements) ? as_copied(compact, dense) : compact, /*non_blocking=*/true);
  const bool gaps = keeps_gaps(compact);
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const bool expanded = tensor.stride(d) == 0 && tensor.size(d) > 1;
    words[d] = expanded ? 0 : gaps ? compact.stride(d) : dense[d];
  }
}

void MessageLayout::pack(const std::vector<at::Tensor>& tensors, const at::Tensor& message,
                         const at::Tensor& device_part) const {
  SMP_INTERNAL_ASSERT(tensors.size() == metas_.size(), tensors.size(), " tensors for a message of ",
                      metas_.size());
  const Elements elements = elements_of(message, device_part);
  const auto copy_all = [&] {
    auto* header = reinterpret_cast<int64_t*>(message.mutable_data_ptr<uint8_t>());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i];
      int64_t* words = header + header_at_[i];
      words[0] = content_of(tensor);
      if (words[0] == kUndefined) continue;
      SMP_INTERNAL_ASSERT(tensor.sizes() == at::IntArrayRef(metas_[i].sizes) &&
                              tensor.scalar_type() == metas_[i].dtype,
                          "a tensor of ", tensor.sizes(), " ", tensor.scalar_type(),
                          " where the graph has ", metas_[i].to_string());
      if (words[0] == kElements) copy_in(i, tensor, elements, words + 1);
    }
  };
  if (crosses(elements)) {
    copy_stream().to_host(copy_all);
  } else {
    copy_all();
  }
}

at::Tensor MessageLayout::pack(const std::vector<at::Tensor>& tensors) const {
  const at::Tensor message = make_buffer();
  pack(tensors, message);
  return message;
}

std::vector<at::Tensor> MessageLayout::unpack(const at::Tensor& message,
                                              const at::Tensor& device_part) const {
  std::vector<at::Tensor> tensors;
  unpack(message, tensors, device_part);
  return tensors;
}

void MessageLayout::unpack(const at::Tensor& message, std::vector<at::Tensor>& tensors,
                           const at::Tensor& device_part) const {
  const Elements elements = elements_of(message, device_part);
  const auto make_all = [&] {
    const auto* header = reinterpret_cast<const int64_t*>(message.const_data_ptr<uint8_t>());
    for (size_t i = 0; i < metas_.size(); ++i) {
      const int64_t* words = header + header_at_[i];
      const at::IntArrayRef strides(words + 1, metas_[i].sizes.size());
      switch (words[0]) {
        case kUndefined:
          tensors.emplace_back();
          break;
        case kZeros:
          tensors.push_back(zeros_of(metas_[i]));
          break;
        default:
          tensors.push_back(with_strides(elements, i, strides));
      }
    }
  };
  if (crosses(elements)) {
    copy_stream().to_device(message, tensors, make_all);
  } else {
    make_all();
  }
}

}  // namespace smp::pipeline
