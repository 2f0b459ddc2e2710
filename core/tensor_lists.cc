// SPDX-License-Identifier: Apache-2.0
#include "core/tensor_lists.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace smp::core {
namespace {

/// Whether a list may hold the two.
bool fit_lists(const at::Tensor& to, const at::Tensor& from) {
  return fits_lists(to) && fits_lists(from) && to.device() == from.device() && lie_alike(to, from);
}

}  // namespace

bool fits_lists(const at::Tensor& tensor) {
  if (tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.is_neg()) return false;
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
      return true;
    default:
      return false;
  }
}

bool lie_alike(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  if (!a.is_non_overlapping_and_dense() || !b.is_non_overlapping_and_dense()) return false;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

bool lie_apart(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<const char*, const char*>> ranges;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    ranges.emplace_back(begin, begin + (last + 1) * static_cast<int64_t>(tensor.itemsize()));
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) return false;
  }
  return true;
}

bool fit_one_kernel(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> all;
  for (const auto& list : lists) {
    for (size_t i = 0; i < list.size(); ++i) {
      const at::Tensor& first = lists.front().at(i);
      if (!fits_lists(list[i]) || list[i].device() != first.device() ||
          list[i].scalar_type() != first.scalar_type() || !lie_alike(list[i], first)) {
        return false;
      }
    }
    all.insert(all.end(), list.begin(), list.end());
  }
  return lie_apart(all);
}

TensorUpdates::Key TensorUpdates::key_of(const at::Tensor& to, const at::Tensor& from) {
  return {to.device().type(), to.device().index(), to.scalar_type(), from.scalar_type()};
}

void TensorUpdates::copy(const at::Tensor& to, const at::Tensor& from) {
  if (!fit_lists(to, from)) {
    to.copy_(from);
    return;
  }
  Lists& lists = copies_[key_of(to, from)];
  lists.to.push_back(to);
  lists.from.push_back(from);
}

void TensorUpdates::add(const at::Tensor& to, const at::Tensor& from) {
  if (!fit_lists(to, from) || to.scalar_type() != from.scalar_type()) {
    to.add_(from);
    return;
  }
  Lists& lists = additions_[key_of(to, from)];
  lists.to.push_back(to);
  lists.from.push_back(from);
}

void TensorUpdates::run() {
  for (const auto& [key, lists] : std::exchange(copies_, {})) {
    lists.to.size() == 1 ? static_cast<void>(lists.to[0].copy_(lists.from[0]))
                         : at::_foreach_copy_(lists.to, lists.from);
  }
  for (const auto& [key, lists] : std::exchange(additions_, {})) {
    lists.to.size() == 1 ? static_cast<void>(lists.to[0].add_(lists.from[0]))
                         : at::_foreach_add_(lists.to, lists.from);
  }
}

}  // namespace smp::core
