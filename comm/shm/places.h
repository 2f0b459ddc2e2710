// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/shm/shared_memory.h"

namespace smp::comm {

/// Memory that a rank lets the others of its host read and write: `offset` bytes into the memory
/// `space`, which is the id of a SharedMemory, or kThisProcess for addresses. Space 0: nowhere.
struct Place {
  uint64_t space = 0;
  uint64_t offset = 0;
};
constexpr uint64_t kThisProcess = 1;

/// A tensor of zeros at `offset` of a memory that other ranks of the host map, too. It holds the
/// memory, and `place_of` finds it for as long as it lives.
at::Tensor tensor_in(const std::shared_ptr<SharedMemory>& memory, size_t offset, int64_t numel,
                     at::ScalarType dtype);

/// Where these bytes are for other processes; nowhere, if they do not lie in a memory that
/// tensor_in() was given. From any thread.
Place place_of(const void* data, size_t bytes);

/// The address of a place in this process; null if it does not map that memory.
std::byte* address_of(const Place& place);

}  // namespace smp::comm
