// SPDX-License-Identifier: Apache-2.0
#include "comm/device/ipc.h"

#include <array>
#include <atomic>
#include <map>

namespace smp::comm {
namespace {

std::map<c10::DeviceType, DeviceIpc*>& registry() {
  static std::map<c10::DeviceType, DeviceIpc*> by_type;
  return by_type;
}

// Counts by index: the devices of a process are of one kind.
std::atomic<int64_t>& shared_of(at::Device device) {
  static std::array<std::atomic<int64_t>, 256> by_index{};
  return by_index[static_cast<uint8_t>(device.index())];
}

}  // namespace

void register_device_ipc(c10::DeviceType type, DeviceIpc& ipc) { registry()[type] = &ipc; }

DeviceIpc* device_ipc(c10::DeviceType type) {
  const auto found = registry().find(type);
  return found == registry().end() ? nullptr : found->second;
}

int64_t shared_bytes(at::Device device) { return shared_of(device); }

void count_shared(at::Device device, int64_t bytes) { shared_of(device) += bytes; }

}  // namespace smp::comm
