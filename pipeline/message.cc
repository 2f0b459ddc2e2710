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
#include "graph/content.h"
#include "graph/memory_layout.h"
#include "pipeline/copy_stream.h"

namespace smp::pipeline {
namespace {

constexpr int64_t kAlignment = 64;
/// Words of a tensor's header before its strides: its content and its shift.
constexpr int64_t kFirstStride = 2;

/// The first word of a tensor's header: the kind of the rest.
enum Content : int64_t {
  kNoTensor,
  kElements,
  kNumber,  ///< elements of a number that libtorch has wrapped, which decides no type
  kZeros,   ///< a tensor without memory that backward passes make where a gradient is zero
};

Content content_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return kNoTensor;
  if (tensor._is_zerotensor()) return kZeros;
  return graph::is_wrapped_number(tensor) ? kNumber : kElements;
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

/// Strides without gaps in the same order of dimensions.
std::vector<int64_t> dense_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  const at::Tensor shape =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  return at::empty_like(shape, at::MemoryFormat::Preserve).strides().vec();
}

/// The elements as they lie, with these strides, which leave no gaps: a device copies them to the
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
    words += kFirstStride + static_cast<int64_t>(meta.sizes.size());
  }
  header_bytes_ = nbytes_ = round_up(words * static_cast<int64_t>(sizeof(int64_t)));
  for (const auto& meta : metas_) {
    if (device_.is_cpu()) device_ = meta.device;
    data_at_.push_back(nbytes_);
    // Its first element may be anywhere in the first 64 bytes.
    nbytes_ += round_up(meta.nbytes() + kAlignment - static_cast<int64_t>(elementSize(meta.dtype)));
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

/// Where the elements of one tensor lie.
struct MessageLayout::Slot {
  const graph::TensorMeta& meta;
  const at::Tensor& memory;
  int64_t shift;   ///< elements from a multiple of 64 bytes
  int64_t offset;  ///< in the storage of `memory`, in elements

  at::Tensor view(at::IntArrayRef sizes, at::IntArrayRef strides) const;
  at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides) const;
  at::Tensor on_device(const at::Tensor& view) const;
  at::Tensor with_strides(at::IntArrayRef strides) const;
};

/// Made by hand: the dispatcher would cost more than many a message.
at::Tensor MessageLayout::Slot::view(at::IntArrayRef sizes, at::IntArrayRef strides) const {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(memory.storage()),
      c10::DispatchKeySet(c10::computeDispatchKey(meta.dtype, std::nullopt, memory.device())),
      c10::scalarTypeToTypeMeta(meta.dtype));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

/// New memory on the tensor's device, on which it lies as the sender's.
at::Tensor MessageLayout::Slot::allocate(at::IntArrayRef sizes, at::IntArrayRef strides) const {
  const auto options = at::TensorOptions(meta.dtype).device(meta.device);
  return graph::MemoryLayout(sizes, strides, options, shift).allocate();
}

/// A dense view of the message, or a copy of it on the tensor's device. Only a copy to a device may
/// end later.
at::Tensor MessageLayout::Slot::on_device(const at::Tensor& view) const {
  if (view.device() == meta.device) return view;
  return allocate(view.sizes(), view.strides()).copy_(view, /*non_blocking=*/!meta.device.is_cpu());
}

/// A tensor of the message with the sender's strides: on the message's memory, or, where they leave
/// gaps or overlap or it is on another device, a copy.
at::Tensor MessageLayout::Slot::with_strides(at::IntArrayRef strides) const {
  const at::IntArrayRef sizes = meta.sizes;
  const at::Tensor whole = view(sizes, strides);
  // libtorch takes the offset of a complex tensor for one of real numbers when a view of its parts
  // is written, so one has memory of its own, as in one process.
  const bool on_message = !c10::isComplexType(meta.dtype);
  if (on_message && whole.is_non_overlapping_and_dense()) return on_device(whole);
  // The strides may reach beyond the message, which has the elements without gaps.
  const at::Tensor compact = view(without_expansion(sizes, strides), strides);
  if (on_message && compact.is_non_overlapping_and_dense()) {
    const at::Tensor moved = on_device(compact);
    return moved.is_same(compact) ? whole
                                  : moved.as_strided(sizes, strides, moved.storage_offset());
  }
  const at::Tensor packed = on_device(view(compact.sizes(), dense_strides(compact)));
  const at::Tensor copy = allocate(compact.sizes(), compact.strides()).copy_(packed);
  return copy.as_strided(sizes, strides, copy.storage_offset());
}

MessageLayout::Slot MessageLayout::slot_of(size_t index, const Elements& elements,
                                           int64_t shift) const {
  const at::Tensor& memory = elements.memory;
  const int64_t begin = memory.storage_offset() + data_at_[index] - elements.begin;
  const graph::TensorMeta& meta = metas_[index];
  return {meta, memory, shift, begin / static_cast<int64_t>(elementSize(meta.dtype)) + shift};
}

/// Writes the elements and, into the header, how the tensor lies and its strides.
void MessageLayout::copy_in(size_t index, const at::Tensor& tensor, const Elements& elements,
                            int64_t* words) const {
  const int64_t shift = *words++ = graph::shift_of(tensor);
  if (tensor.is_cpu() && elements.memory.is_cpu() && tensor.is_non_overlapping_and_dense() &&
      !tensor.is_conj() && !tensor.is_neg()) {
    std::copy_n(tensor.strides().begin(), tensor.dim(), words);
    if (tensor.numel() > 0) {
      std::memcpy(elements.memory.mutable_data_ptr<uint8_t>() + data_at_[index] +
                      shift * static_cast<int64_t>(tensor.itemsize()),
                  tensor.const_data_ptr(), tensor.nbytes());
    }
    return;
  }
  at::NoGradGuard no_grad;
  const at::Tensor compact = graph::without_expansion(tensor.detach());
  const std::vector<int64_t> dense = dense_strides(compact);
  const at::Tensor view = slot_of(index, elements, shift).view(compact.sizes(), dense);
  view.copy_(crosses(elements) ? as_copied(compact, dense) : compact, /*non_blocking=*/true);
  const bool gaps = keeps_gaps(compact);
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const bool expanded = tensor.stride(d) == 0 && tensor.size(d) > 1;
    words[d] = expanded ? 0 : gaps ? compact.stride(d) : dense[d];
  }
}

std::optional<c10::Event> MessageLayout::begin_pack(const std::vector<at::Tensor>& tensors,
                                                    const at::Tensor& message,
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
      if (words[0] == kNoTensor) continue;
      SMP_INTERNAL_ASSERT(tensor.sizes() == at::IntArrayRef(metas_[i].sizes) &&
                              tensor.scalar_type() == metas_[i].dtype,
                          "a tensor of ", tensor.sizes(), " ", tensor.scalar_type(),
                          " where the graph has ", metas_[i].to_string());
      if (words[0] != kZeros) copy_in(i, tensor, elements, words + 1);
    }
  };
  if (crosses(elements)) return copy_stream().to_host(copy_all);
  copy_all();
  return std::nullopt;
}

at::Tensor MessageLayout::pack(const std::vector<at::Tensor>& tensors) const {
  const at::Tensor message = make_buffer();
  if (const auto copied = begin_pack(tensors, message)) copied->synchronize();
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
      const at::IntArrayRef strides(words + kFirstStride, metas_[i].sizes.size());
      switch (words[0]) {
        case kNoTensor:
          tensors.emplace_back();
          break;
        case kZeros:
          tensors.push_back(zeros_of(metas_[i]));
          break;
        default:
          tensors.push_back(slot_of(i, elements, words[1]).with_strides(strides));
          if (words[0] == kNumber) tensors.back().unsafeGetTensorImpl()->set_wrapped_number(true);
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
