// SPDX-License-Identifier: Apache-2.0
#include "graph/device_properties.h"

#include <map>
#include <utility>

namespace smp::graph {
namespace {

std::map<c10::DeviceType, FindDeviceProperties>& registry() {
  static std::map<c10::DeviceType, FindDeviceProperties> registry;
  return registry;
}

}  // namespace

void register_device_properties(c10::DeviceType type, FindDeviceProperties find) {
  registry()[type] = std::move(find);
}

std::optional<DeviceProperties> device_properties(c10::Device device) {
  const auto found = registry().find(device.type());
  return found == registry().end() ? std::nullopt : found->second(device);
}

}  // namespace smp::graph
