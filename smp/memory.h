// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

#include "smp/export.h"

namespace smp {

/// Memory of the device that a rank computes on, in bytes. The first four are this process's, the
/// last two the whole device's, which other processes may use too.
struct DeviceMemory {
  c10::Device device = c10::kCPU;
  int64_t allocated = 0;  ///< in tensors
  int64_t peak = 0;       ///< the most in tensors since the start, or since `reset_peak_memory`
  int64_t held = 0;       ///< bytes that libtorch's caching allocator holds, freed ones included
  int64_t shared = 0;     ///< beside them, made for messages and collectives of processes
  int64_t free = 0;       ///< bytes of the device that are free
  int64_t total = 0;      ///< all bytes of the device
};

/// Memory of this rank's device; nothing where it computes on the CPU. Does not wait for the
/// device. Throws `UsageError` before `init`.
SMP_API std::optional<DeviceMemory> device_memory();

/// Begins this rank's `DeviceMemory::peak` anew, at the memory allocated now.
SMP_API void reset_peak_memory();

/// A table of the memory of all ranks' devices, a row for each; collective, between steps. Ranks
/// that are threads of one process and share a device show the same numbers. Empty where the ranks
/// compute on the CPU.
SMP_API std::string memory_report();

}  // namespace smp
