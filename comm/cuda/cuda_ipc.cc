// SPDX-License-Identifier: Apache-2.0
// CUDA's inter-process memory and events.

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "comm/device/ipc.h"

namespace smp::comm {
namespace {

static_assert(sizeof(IpcHandle) == sizeof(cudaIpcMemHandle_t) &&
              sizeof(IpcHandle) == sizeof(cudaIpcEventHandle_t));

template <class To, class From>
To with_bytes_of(const From& from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

cudaStream_t cuda_stream(const c10::Stream& stream) {
  return c10::cuda::CUDAStream(c10::cuda::CUDAStream::UNCHECKED, stream).stream();
}

/// Gives something of a device back. Errors are those of a device that has failed, which other
/// calls report.
template <class T>
void give_back(at::Device device, cudaError_t (*call)(T), T value) noexcept {
  try {
    const c10::DeviceGuard guard(device);
    if (call(value) != cudaSuccess) {
      cudaGetLastError();  // or the next kernel would report it
    }
  } catch (const c10::Error&) {
    // The device has failed.
  }
}

/// Null where there is no room.
void* allocate(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  C10_CUDA_CHECK(error);
  return memory;
}

at::Tensor as_tensor(void* memory, at::Device device, int64_t bytes, cudaError_t (*free)(void*)) {
  const auto deleter = [device, free](void* held) { give_back(device, free, held); };
  return at::for_blob(memory, {bytes})
      .deleter(deleter)
      .options(at::TensorOptions(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

class CudaIpcEvent final : public IpcEvent {
 public:
  /// Makes one.
  explicit CudaIpcEvent(at::Device device) : device_(device) {
    const c10::DeviceGuard guard(device_);
    C10_CUDA_CHECK(
        cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventInterprocess));
  }

  /// Opens that of another process.
  CudaIpcEvent(at::Device device, const IpcHandle& handle) : device_(device) {
    const c10::DeviceGuard guard(device_);
    C10_CUDA_CHECK(cudaIpcOpenEventHandle(&event_, with_bytes_of<cudaIpcEventHandle_t>(handle)));
  }

  ~CudaIpcEvent() override { give_back(device_, &cudaEventDestroy, event_); }

  void record(const c10::Stream& stream) override {
    const c10::DeviceGuard guard(device_);
    C10_CUDA_CHECK(cudaEventRecord(event_, cuda_stream(stream)));
  }

  void block(const c10::Stream& stream) override {
    const c10::DeviceGuard guard(device_);
    C10_CUDA_CHECK(cudaStreamWaitEvent(cuda_stream(stream), event_, 0));
  }

  bool query() override {
    const c10::DeviceGuard guard(device_);
    const cudaError_t result = cudaEventQuery(event_);
    if (result == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    C10_CUDA_CHECK(result);
    return true;
  }

  IpcHandle handle() override {
    const c10::DeviceGuard guard(device_);
    cudaIpcEventHandle_t handle;
    C10_CUDA_CHECK(cudaIpcGetEventHandle(&handle, event_));
    return with_bytes_of<IpcHandle>(handle);
  }

 private:
  const at::Device device_;
  cudaEvent_t event_ = nullptr;
};

class CudaIpc final : public DeviceIpc {
 public:
  /// Not libtorch's caching allocator's: its blocks lie in larger ones, which the other process
  /// would see whole, and in expandable segments have no handle.
  at::Tensor make_memory(at::Device device, int64_t bytes) override {
    const c10::DeviceGuard guard(device);
    const size_t whole = (static_cast<size_t>(bytes) + kPage - 1) / kPage * kPage;
    void* memory = allocate(whole);
    if (memory == nullptr) {
      c10::cuda::CUDACachingAllocator::emptyCache();
      memory = allocate(whole);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "CUDA out of memory: no ", whole,
                     " bytes of ", device, " for messages between processes");
    return as_tensor(memory, device, static_cast<int64_t>(whole), &cudaFree).narrow(0, 0, bytes);
  }

  IpcHandle handle_of(const at::Tensor& memory) override {
    const c10::DeviceGuard guard(memory.device());
    cudaIpcMemHandle_t handle;
    C10_CUDA_CHECK(cudaIpcGetMemHandle(&handle, memory.mutable_data_ptr()));
    return with_bytes_of<IpcHandle>(handle);
  }

  at::Tensor open_memory(const IpcHandle& handle, at::Device device, int64_t bytes) override {
    const c10::DeviceGuard guard(device);
    void* memory = nullptr;
    C10_CUDA_CHECK(cudaIpcOpenMemHandle(&memory, with_bytes_of<cudaIpcMemHandle_t>(handle),
                                        cudaIpcMemLazyEnablePeerAccess));
    return as_tensor(memory, device, bytes, &cudaIpcCloseMemHandle);
  }

  std::unique_ptr<IpcEvent> make_event(at::Device device) override {
    return std::make_unique<CudaIpcEvent>(device);
  }
  std::unique_ptr<IpcEvent> open_event(const IpcHandle& handle, at::Device device) override {
    return std::make_unique<CudaIpcEvent>(device, handle);
  }

 private:
  /// CUDA shares memory in blocks of this size.
  static constexpr size_t kPage = size_t{2} << 20;
};

const bool registered_ipc = [] {
  static CudaIpc ipc;
  register_device_ipc(c10::DeviceType::CUDA, ipc);
  return true;
}();

}  // namespace
}  // namespace smp::comm
