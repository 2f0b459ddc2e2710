// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <optional>

namespace smp::graph {

/// The speed of a GPU, as it tells it. The clocks are the highest.
struct DeviceProperties {
  bool is_geforce = false;  ///< whether it is one of those for games
  int capability = 0;       ///< its compute capability, 90 for 9.0
  int multiprocessors = 0;
  double clock_khz = 0;   ///< clock of the multiprocessors
  double memory_khz = 0;  ///< clock of the memory, which sends two bits a cycle and line
  int bus_bits = 0;       ///< lines to the memory
};

/// Nothing for a device that this machine has not.
using FindDeviceProperties = std::function<std::optional<DeviceProperties>(c10::Device device)>;

/// Says how devices of a kind are asked. Called by the implementation before any are used.
void register_device_properties(c10::DeviceType type, FindDeviceProperties find);

/// Nothing for a device that this machine has not, and for kinds that say nothing.
std::optional<DeviceProperties> device_properties(c10::Device device);

}  // namespace smp::graph
