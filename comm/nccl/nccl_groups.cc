// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/nccl_groups.h"

#include <cuda_runtime_api.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/nccl/group_store.h"
#include "core/check.h"

namespace smp::comm {
namespace {

// Blocks of threads that move a port's messages. By default a group of two takes up to 32, beside
// which matrix products get as many multiprocessors less. NCCL_MAX_CTAS takes precedence.
constexpr int kLaneBlocks = 4;

DeviceGroup make_nccl_group(const c10::intrusive_ptr<c10d::Store>& store, const Group& host,
                            const std::string& name, int rank, int size, GroupUse use) {
  const bool is_lane = use == GroupUse::kLane;
  // libtorch hands out 32 streams of each priority in turn. Ports alone have the high one here: two
  // of opposite directions in one stream would wait for each other.
  const auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/is_lane);
  if (is_lane) {
    options->config.maxCTAs = kLaneBlocks;
  }
  options->timeout = host.timeout();
  options->group_name = c10::str(host.name(), " ", name);
  const auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      c10::make_intrusive<c10d::PrefixStore>(name, store), rank, size, options);
  return DeviceGroup(group.get(), [group](c10d::Backend*) {});
}

}  // namespace

bool has_nccl() { return true; }

std::string nccl_gpu(at::Device device) {
  if (!device.is_cuda()) {
    return "";
  }
  cudaDeviceProp properties;
  const cudaError_t code = cudaGetDeviceProperties(&properties, device.index());
  SMP_INTERNAL_ASSERT(code == cudaSuccess, cudaGetErrorString(code));
  return std::string(properties.uuid.bytes, sizeof(properties.uuid.bytes));
}

MakeDeviceGroup nccl_groups(const CommunicatorPtr& host) {
  return [store = make_group_store(*host), host](const std::string& name, int rank, int size,
                                                 GroupUse use) {
    return make_nccl_group(store, *host, name, rank, size, use);
  };
}

}  // namespace smp::comm
