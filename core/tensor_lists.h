// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <map>
#include <tuple>
#include <vector>

// Operations on many tensors in few calls of libtorch's functions over lists (`at::_foreach_add_`
// ...). A device then gets one kernel for up to a hundred tensors; on the CPU they are loops.
namespace smp::core {

/// Whether the functions over lists have kernels for tensors like this: not the CPU's, with memory
/// for each element, of float32, float64, float16 or bfloat16.
bool fits_lists(const at::Tensor& tensor);

/// Whether two tensors have elements of the same indices in the same order of memory, without gaps.
/// Where a list has others, libtorch calls a kernel for each tensor of it.
bool lie_alike(const at::Tensor& a, const at::Tensor& b);

/// Whether no two of these tensors share memory.
bool lie_apart(const std::vector<at::Tensor>& tensors);

/// Whether one kernel can go through lists together: their tensors at one index fit lists, are of
/// one device and dtype, lie alike, and share no memory.
bool fit_one_kernel(const std::vector<std::vector<at::Tensor>>& lists);

/// Copies and additions of tensors, each into another one: in one call for all of a device and
/// dtype, or at once where one call would not do more. The bits are those of `copy_` and `add_`.
class TensorUpdates {
 public:
  /// `to.copy_(from)`, now or in `run`.
  void copy(const at::Tensor& to, const at::Tensor& from);
  /// `to.add_(from)`, now or in `run`.
  void add(const at::Tensor& to, const at::Tensor& from);
  /// Does the waiting operations: copies, then additions.
  void run();

 private:
  struct Lists {
    std::vector<at::Tensor> to, from;
  };
  // Dtypes of the written tensor and of the read one.
  using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType, at::ScalarType>;

  static Key key_of(const at::Tensor& to, const at::Tensor& from);

  std::map<Key, Lists> copies_, additions_;
};

}  // namespace smp::core
