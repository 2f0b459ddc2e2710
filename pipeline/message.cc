#include "pipeline/message.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>

#include "smp/core/error.h"

namespace smp::pipeline {
namespace {

constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// One element for every expanded dimension.
at::Tensor without_expansion(const at::Tensor& tensor) {
  at::Tensor result = tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) result = result.narrow(d, 0, 1);
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

/// Whether the receiver is to have the same gaps between elements: kernels take another way there.
/// A small part of a large tensor becomes dense instead, which would cost too much memory.
bool keeps_gaps(const at::Tensor& tensor) {
  constexpr int64_t kWorthwhile = 8;
  int64_t span = tensor.numel() > 0 ? 1 : 0;
  for (int64_t d = 0; d < tensor.dim() && span > 0; ++d) {
    span += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return span <= kWorthwhile * tensor.numel();
}

}  // namespace

MessageLayout::MessageLayout(const std::vector<graph::TensorMeta>& metas) : metas_(metas) {
  int64_t words = 0;
  for (const auto& meta : metas_) {
    header_at_.push_back(words);
    words += 1 + static_cast<int64_t>(meta.sizes.size());
  }
  nbytes_ = round_up(words * static_cast<int64_t>(sizeof(int64_t)));
  for (const auto& meta : metas_) {
    data_at_.push_back(nbytes_);
    nbytes_ += round_up(meta.nbytes());
  }
}

at::Tensor MessageLayout::make_buffer() const { return at::empty({nbytes_}, at::kByte); }

/// Made by hand: the dispatcher would cost more than many a message.
at::Tensor MessageLayout::view_of(const at::Tensor& message, size_t index, at::IntArrayRef sizes,
                                  at::IntArrayRef strides) const {
  const auto dtype = metas_[index].dtype;
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(message.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  const int64_t offset = message.storage_offset() + data_at_[index];
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides, offset / static_cast<int64_t>(elementSize(dtype)));
  return view;
}

/// A tensor of the message with the sender's strides: on the message's memory, or, where they leave
/// gaps or overlap, a copy.
at::Tensor MessageLayout::with_strides(const at::Tensor& message, size_t index,
                                       at::IntArrayRef strides) const {
  const at::IntArrayRef sizes = metas_[index].sizes;
  const at::Tensor view = view_of(message, index, sizes, strides);
  if (view.is_non_overlapping_and_dense()) return view;
  const at::Tensor compact = without_expansion(view);
  if (compact.is_non_overlapping_and_dense()) return view;
  const at::Tensor packed = view_of(message, index, compact.sizes(), dense_strides(compact));
  const at::Tensor copy = at::empty_strided(compact.sizes(), compact.strides(), packed.options());
  return copy.copy_(packed).as_strided(sizes, strides);
}

/// Writes the elements and, into the header, the strides of one tensor.
void MessageLayout::copy_in(size_t index, const at::Tensor& tensor, const at::Tensor& message,
                            int64_t* words) const {
  if (tensor.is_cpu() && tensor.is_non_overlapping_and_dense() && !tensor.is_conj() &&
      !tensor.is_neg()) {
    std::copy_n(tensor.strides().begin(), tensor.dim(), words);
    if (tensor.numel() > 0) {
      std::memcpy(message.mutable_data_ptr<uint8_t>() + data_at_[index], tensor.const_data_ptr(),
                  tensor.nbytes());
    }
    return;
  }
  at::NoGradGuard no_grad;
  const at::Tensor compact = without_expansion(tensor.detach());
  const std::vector<int64_t> dense = dense_strides(compact);
  view_of(message, index, compact.sizes(), dense).copy_(compact);
  const bool gaps = keeps_gaps(compact);
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const bool expanded = tensor.stride(d) == 0 && tensor.size(d) > 1;
    words[d] = expanded ? 0 : gaps ? compact.stride(d) : dense[d];
  }
}

void MessageLayout::pack(const std::vector<at::Tensor>& tensors, const at::Tensor& message) const {
  SMP_INTERNAL_ASSERT(tensors.size() == metas_.size(), tensors.size(), " tensors for a message of ",
                      metas_.size());
  auto* header = reinterpret_cast<int64_t*>(message.mutable_data_ptr<uint8_t>());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    int64_t* words = header + header_at_[i];
    words[0] = tensor.defined();
    if (!tensor.defined()) continue;
    SMP_INTERNAL_ASSERT(tensor.sizes() == at::IntArrayRef(metas_[i].sizes) &&
                            tensor.scalar_type() == metas_[i].dtype,
                        "a tensor of ", tensor.sizes(), " ", tensor.scalar_type(),
                        " where the graph has ", metas_[i].to_string());
    copy_in(i, tensor, message, words + 1);
  }
}

at::Tensor MessageLayout::pack(const std::vector<at::Tensor>& tensors) const {
  const at::Tensor message = make_buffer();
  pack(tensors, message);
  return message;
}

std::vector<at::Tensor> MessageLayout::unpack(const at::Tensor& message) const {
  std::vector<at::Tensor> tensors;
  unpack(message, tensors);
  return tensors;
}

void MessageLayout::unpack(const at::Tensor& message, std::vector<at::Tensor>& tensors) const {
  const auto* header = reinterpret_cast<const int64_t*>(message.const_data_ptr<uint8_t>());
  for (size_t i = 0; i < metas_.size(); ++i) {
    const int64_t* words = header + header_at_[i];
    if (words[0] == 0) {
      tensors.emplace_back();
      continue;
    }
    const at::IntArrayRef strides(words + 1, metas_[i].sizes.size());
    const at::Tensor tensor = with_strides(message, i, strides);
    tensors.push_back(metas_[i].device.is_cpu() ? tensor : tensor.to(metas_[i].device));
  }
}

}  // namespace smp::pipeline
