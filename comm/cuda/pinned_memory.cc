// SPDX-License-Identifier: Apache-2.0
#include "comm/cuda/pinned_memory.h"

#include <c10/core/DeviceGuard.h>
#include <cuda_runtime_api.h>

namespace smp::comm {

bool pin_memory(void* memory, size_t bytes, int index) {
  const c10::DeviceGuard guard(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)));
  const bool pinned = cudaHostRegister(memory, bytes, cudaHostRegisterPortable) == cudaSuccess;
  if (!pinned) {
    cudaGetLastError();  // or the next kernel would report it
  }
  return pinned;
}

void unpin_memory(void* memory) {
  if (cudaHostUnregister(memory) != cudaSuccess) {
    cudaGetLastError();
  }
}

}  // namespace smp::comm
