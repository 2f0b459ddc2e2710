// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "smp/c.h"

/// Tensors of the C interface. Internal.
namespace smp::c {

/// Tensors with the names of those that are given by name, empty for others.
struct NamedTensors {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
};

/// A caller's tensors, which go on using its memory where that is contiguous; others are copied,
/// and those of a GPU other than `device` moved there. Errors call them `what`. Throws `UsageError`
/// for structures that say nothing sensible.
NamedTensors read_tensors(const smp_tensor* tensors, int64_t count, const char* what,
                          at::Device device);
at::Tensor read_tensor(const smp_tensor& tensor, const std::string& what, at::Device device);

/// Copies results into the caller's memory, or fills in types and sizes where it gave none. Throws
/// `UsageError` where there are fewer results, or they have other types or sizes.
void write_tensors(const std::vector<at::Tensor>& results, smp_tensor* tensors, int64_t count);

/// The description of a contiguous tensor on the CPU. Throws `UsageError` where there is none.
smp_tensor describe(const at::Tensor& tensor);

/// Descriptions in an array of elements of `size` bytes, which the caller's header knows.
class DescribedArray {
 public:
  DescribedArray(const std::vector<at::Tensor>& tensors, int64_t size);
  smp_tensor* data() { return reinterpret_cast<smp_tensor*>(bytes_.data()); }

 private:
  std::vector<std::max_align_t> bytes_;
};

/// Stores it where the caller wants it. Throws `UsageError` unless the structure says its size.
void store(const smp_tensor& described, smp_tensor* tensor);

/// The defined tensors of a value, in the order in which its structure holds them.
std::vector<at::Tensor> tensors_of(const c10::IValue& value);

}  // namespace smp::c
