// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// One kernel that does several operations to each element of lists of tensors. It is written while
// a program runs, and compiled once for each process and device.
namespace smp::optim {

/// The most lists and numbers that a kernel has.
constexpr size_t kKernelLists = 5;
constexpr size_t kKernelNumbers = 16;

/// The computation of a kernel on the elements that the lists have in one place.
struct ListKernelText {
  /// Statements of CUDA C++. `x[i]` is the element of list i, `s(i)` the number i. The functions
  /// `mul`, `add`, `addcmul`, `addcdiv`, `sqrt` and `maximum` compute the results of libtorch's
  /// functions over lists (`at::_foreach_mul` ...) for an element, with their bits.
  std::string body;
  /// A bit for each list of which elements are read, and one for each that is written.
  uint32_t read = 0, written = 0;
};

/// Runs a kernel on the current stream of the device, in a launch for some 70 tensors. The lists
/// are as long as each other, and their tensors at one index have the dtype of the first one and
/// lie alike (`core::lie_alike`).
using ListKernel = std::function<void(const std::vector<std::vector<at::Tensor>>& lists,
                                      const std::vector<double>& numbers)>;

/// The kernel for lists whose first tensor is `first`: of float32, float64, float16 or bfloat16.
/// Empty where there is none: in a build without --config=cuda, for other devices than GPUs, and
/// where CUDA's compiler cannot be loaded or refuses, which the log then says once.
ListKernel find_list_kernel(const ListKernelText& text, const at::Tensor& first);

}  // namespace smp::optim
