// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/dlpack.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "smp/c.h"

/// Memory of the C interface's callers. Internal.
namespace smp::c {

/// The sizes of the structure in the versions of the header.
constexpr int64_t kSizeInVersion1 = offsetof(smp_tensor, device);
constexpr auto kSize = static_cast<int64_t>(sizeof(smp_tensor));

/// A type of numbers: the header's, libtorch's, and DLPack's beside its bits.
struct NumberType {
  int32_t dtype;
  at::ScalarType type;
  uint8_t dlpack_code;
};
constexpr NumberType kNumberTypes[] = {
    {SMP_FLOAT32, at::kFloat, kDLFloat}, {SMP_FLOAT64, at::kDouble, kDLFloat},
    {SMP_INT32, at::kInt, kDLInt},       {SMP_INT64, at::kLong, kDLInt},
    {SMP_INT16, at::kShort, kDLInt},     {SMP_INT8, at::kChar, kDLInt},
    {SMP_UINT8, at::kByte, kDLUInt},     {SMP_BOOL, at::kBool, kDLBool},
    {SMP_FLOAT16, at::kHalf, kDLFloat},  {SMP_BFLOAT16, at::kBFloat16, kDLBfloat}};

/// A tensor of `size` bytes with all members of this library's header: those that lie behind are 0.
smp_tensor with_all_members(const smp_tensor& tensor, int64_t size);

/// The index-th of an array whose elements have the size that the first says.
template <class T>
T* element(T* tensors, int64_t index) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(tensors) + index * tensors->struct_size);
}

/// The description of a tensor that is given by DLPack, with the name of `tensor`; others as they
/// are. Throws `UsageError` for types, devices and versions that are not taken, and where data is
/// given, too. Errors call the tensor `what`.
smp_tensor without_dlpack(const smp_tensor& tensor, const std::string& what);

/// Whether DLPack says that the memory must not be written.
bool is_read_only(const smp_tensor& tensor);

/// Where the memory is. Throws `UsageError` for a GPU that this process does not have.
at::Device device_of(int32_t device, int32_t index, const std::string& what);

/// The caller's tensors in a call. At its end GPUs use their memory no more, and inputs that DLPack
/// describes are given back by their deleters, each once. An array whose first element has no
/// sensible size has none. Does not allocate: calls that are refused give them back, too.
class CallersMemory {
 public:
  CallersMemory(const smp_tensor* inputs, int64_t count, const smp_tensor* target = nullptr,
                const smp_tensor* outputs = nullptr, int64_t output_count = 0) noexcept;
  ~CallersMemory();
  CallersMemory(const CallersMemory&) = delete;
  CallersMemory& operator=(const CallersMemory&) = delete;

  /// Waits for the GPUs on which tensors are. Throws their errors, such as those of kernels.
  void wait_for_gpus() const;

 private:
  struct Array {
    Array(const smp_tensor* tensors, int64_t given) noexcept;
    smp_tensor at(int64_t index) const {
      return with_all_members(*element(first, index), first->struct_size);
    }

    const smp_tensor* first;
    int64_t count;
  };

  /// Inputs, then the target, then outputs.
  smp_tensor at(int64_t index) const;
  int64_t count() const { return read_count() + outputs_.count; }
  int64_t read_count() const { return inputs_.count + target_.count; }

  const Array inputs_, target_, outputs_;
};

}  // namespace smp::c
