// SPDX-License-Identifier: Apache-2.0
#include "comm/device/ipc.h"

#include <map>

namespace smp::comm {
namespace {

std::map<c10::DeviceType, DeviceIpc*>& registry() {
  static std::map<c10::DeviceType, DeviceIpc*> by_type;
  return by_type;
}

}  // namespace

void register_device_ipc(c10::DeviceType type, DeviceIpc& ipc) { registry()[type] = &ipc; }

DeviceIpc* device_ipc(c10::DeviceType type) {
  const auto found = registry().find(type);
  return found == registry().end() ? nullptr : found->second;
}

}  // namespace smp::comm
