// SPDX-License-Identifier: Apache-2.0
// The properties of GPUs, as CUDA's runtime tells them.

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string_view>

#include "graph/device_properties.h"

namespace smp::graph {
namespace {

/// Not `cudaDeviceProp`, which has no clocks from CUDA 13 on.
int attribute(cudaDeviceAttr number, int index) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, number, index));
  return value;
}

std::optional<DeviceProperties> properties_of(c10::Device device) {
  const int index = std::max<int>(device.index(), 0);
  if (index >= c10::cuda::device_count()) return std::nullopt;
  const cudaDeviceProp& cuda = *at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index));
  DeviceProperties properties;
  properties.is_geforce = std::string_view(cuda.name).find("GeForce") != std::string_view::npos;
  properties.capability = 10 * cuda.major + cuda.minor;
  properties.multiprocessors = cuda.multiProcessorCount;
  properties.clock_khz = attribute(cudaDevAttrClockRate, index);
  properties.memory_khz = attribute(cudaDevAttrMemoryClockRate, index);
  properties.bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth, index);
  return properties;
}

const bool registered_properties = [] {
  register_device_properties(c10::DeviceType::CUDA, &properties_of);
  return true;
}();

}  // namespace
}  // namespace smp::graph
