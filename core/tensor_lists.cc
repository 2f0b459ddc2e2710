// SPDX-License-Identifier: Apache-2.0
#include "core/tensor_lists.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>

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
