// SPDX-License-Identifier: Apache-2.0
#include "smp/c/callers_memory.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <string>

#include "core/check.h"

namespace smp::c {
namespace {

int32_t type_of(const DLDataType& type, const std::string& what) {
  for (const NumberType& known : kNumberTypes) {
    const bool fits =
        known.dlpack_code == type.code && at::elementSize(known.type) * 8 == type.bits;
    if (fits && type.lanes == 1) return known.dtype;
  }
  core::fail<UsageError>(what, ": DLPack type code ", static_cast<int>(type.code), " of ",
                         static_cast<int>(type.bits), " bits and ", type.lanes,
                         " lanes has no smp_dtype. Convert it, for example to float32");
}

/// Sets the device. Memory of the host that is pinned is the host's.
void set_device(smp_tensor& tensor, const DLDevice& device, const std::string& what) {
  const bool is_host = device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
  tensor.device = is_host ? SMP_CPU : SMP_GPU;
  tensor.device_index = is_host ? 0 : device.device_id;
  const auto kind = at::getAccelerator().value_or(at::kCPU);
  const bool is_gpu = (device.device_type == kDLCUDA && kind == at::kCUDA) ||
                      (device.device_type == kDLExtDev && kind == at::kPrivateUse1);
  SMP_CHECK_WITH(UsageError, is_host || is_gpu, what, ": DLPack device type ",
                 static_cast<int>(device.device_type),
                 " is not taken. This library takes memory of the host (1, and 3 if pinned) and, "
                 "built for CUDA, of its GPUs (2). Copy the tensor there");
}

smp_tensor description_of(const DLTensor& given, const std::string& what) {
  smp_tensor tensor{};
  tensor.struct_size = sizeof tensor;
  tensor.dtype = type_of(given.dtype, what);
  set_device(tensor, given.device, what);
  tensor.dims = given.ndim;
  SMP_CHECK_WITH(UsageError,
                 tensor.dims >= 0 && tensor.dims <= SMP_MAX_DIMS &&
                     (tensor.dims == 0 || given.shape != nullptr),
                 what, ": the DLPack tensor has ", tensor.dims, " dimensions at shape ",
                 static_cast<const void*>(given.shape), ". A tensor has 0 to ", SMP_MAX_DIMS,
                 " (SMP_MAX_DIMS), with their sizes there");
  std::copy_n(given.shape, tensor.dims, tensor.sizes);
  if (given.strides != nullptr) {
    tensor.layout = SMP_STRIDED;
    std::copy_n(given.strides, tensor.dims, tensor.strides);
  }
  if (given.data != nullptr) tensor.data = static_cast<char*>(given.data) + given.byte_offset;
  return tensor;
}

const DLTensor& tensor_of(const DLManagedTensorVersioned& given, const std::string& what) {
  SMP_CHECK_WITH(UsageError, given.version.major == DLPACK_MAJOR_VERSION, what,
                 ": the tensor is of DLPack ", given.version.major, ".", given.version.minor,
                 ", and this library knows versions ", DLPACK_MAJOR_VERSION,
                 ".x. Ask its library for one of those");
  return given.dl_tensor;
}

/// False for a number that was never set. Later versions of the header have more members than this.
bool is_sensible(int64_t struct_size) {
  constexpr int64_t kMost = 4096;
  return struct_size >= kSizeInVersion1 && struct_size <= kMost;
}

/// Versions of DLPack differ behind the deleter only.
template <class Managed>
void call_deleter(Managed* managed) noexcept {
  if (managed != nullptr && managed->deleter != nullptr) managed->deleter(managed);
}

/// The library uses the caller's memory on the current stream only.
void wait_for_gpu(const smp_tensor& tensor) {
  const std::string what = "a tensor";
  const smp_tensor described = without_dlpack(tensor, what);
  if (described.device == SMP_CPU) return;
  const at::Device device = device_of(described.device, described.device_index, what);
  at::accelerator::getCurrentStream(device.index()).synchronize();
}

}  // namespace

smp_tensor with_all_members(const smp_tensor& tensor, int64_t size) {
  smp_tensor all{};
  std::memcpy(static_cast<void*>(&all), &tensor, static_cast<size_t>(std::min(size, kSize)));
  return all;
}

smp_tensor without_dlpack(const smp_tensor& tensor, const std::string& what) {
  if (tensor.dlpack == nullptr && tensor.dlpack_versioned == nullptr) return tensor;
  const bool is_one =
      tensor.data == nullptr && (tensor.dlpack == nullptr || tensor.dlpack_versioned == nullptr);
  SMP_CHECK_WITH(UsageError, is_one, what,
                 ": data, dlpack and dlpack_versioned are members of which one says where the "
                 "tensor is. Set the others to NULL");
  smp_tensor described =
      description_of(tensor.dlpack != nullptr ? tensor.dlpack->dl_tensor
                                              : tensor_of(*tensor.dlpack_versioned, what),
                     what);
  described.name = tensor.name;
  return described;
}

bool is_read_only(const smp_tensor& tensor) {
  return tensor.dlpack_versioned != nullptr &&
         (tensor.dlpack_versioned->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
}

at::Device device_of(int32_t device, int32_t index, const std::string& what) {
  if (device == SMP_CPU) return at::kCPU;
  SMP_CHECK_WITH(UsageError, device == SMP_GPU, what, ": device ", device,
                 " is none of smp_device. Set it, for example to SMP_CPU");
  const int count = at::accelerator::deviceCount();
  SMP_CHECK_WITH(UsageError, count > 0, what,
                 ": device is SMP_GPU, and this process has no GPU: the library is built without "
                 "CUDA, or sees none. Use memory of the host (SMP_CPU), or a build for CUDA "
                 "(docs/cuda.md)");
  SMP_CHECK_WITH(UsageError, index >= 0 && index < count, what, ": device_index is ", index,
                 ", and this process has ", count, " GPUs. Give a number from 0 to ", count - 1);
  return {at::getAccelerator(/*checked=*/true).value(), static_cast<c10::DeviceIndex>(index)};
}

CallersMemory::Array::Array(const smp_tensor* tensors, int64_t given) noexcept
    : first(tensors),
      count(tensors != nullptr && is_sensible(tensors->struct_size) ? std::max<int64_t>(given, 0)
                                                                    : 0) {}

CallersMemory::CallersMemory(const smp_tensor* inputs, int64_t count, const smp_tensor* target,
                             const smp_tensor* outputs, int64_t output_count) noexcept
    : inputs_(inputs, count), target_(target, 1), outputs_(outputs, output_count) {}

CallersMemory::~CallersMemory() {
  for (int64_t i = 0; i < count(); ++i) {
    try {
      wait_for_gpu(at(i));
    } catch (const std::exception&) {
      // The call has failed by it.
    }
  }
  for (int64_t i = 0; i < read_count(); ++i) {
    const smp_tensor tensor = at(i);
    bool is_given_back = false, is_given_back_versioned = false;  // one may be given twice
    for (int64_t before = 0; before < i; ++before) {
      const smp_tensor other = at(before);
      is_given_back = is_given_back || other.dlpack == tensor.dlpack;
      is_given_back_versioned =
          is_given_back_versioned || other.dlpack_versioned == tensor.dlpack_versioned;
    }
    if (!is_given_back) call_deleter(tensor.dlpack);
    if (!is_given_back_versioned) call_deleter(tensor.dlpack_versioned);
  }
}

void CallersMemory::wait_for_gpus() const {
  for (int64_t i = 0; i < count(); ++i) wait_for_gpu(at(i));
}

smp_tensor CallersMemory::at(int64_t index) const {
  if (index < inputs_.count) return inputs_.at(index);
  return index < read_count() ? target_.at(index - inputs_.count)
                              : outputs_.at(index - read_count());
}

}  // namespace smp::c
