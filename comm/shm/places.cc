// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/places.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace smp::comm {
namespace {

// The memories of this process on which there are tensors. Rank threads share one mapping, which is
// then listed once for each.
struct Registry {
  std::mutex mutex;
  std::vector<const SharedMemory*> memories;
};

Registry& registry() {
  static auto* instance = new Registry;  // tensors may outlive objects that static destructors end
  return *instance;
}

void forget(const SharedMemory* memory) {
  Registry& known = registry();
  std::lock_guard<std::mutex> lock(known.mutex);
  known.memories.erase(std::find(known.memories.begin(), known.memories.end(), memory));
}

}  // namespace

at::Tensor tensor_in(const std::shared_ptr<SharedMemory>& memory, size_t offset, int64_t numel,
                     at::ScalarType dtype) {
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().memories.push_back(memory.get());
  }
  return at::from_blob(
      memory->data() + offset, {numel}, [memory](void*) { forget(memory.get()); },
      at::TensorOptions(dtype));
}

Place place_of(const void* data, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const SharedMemory* memory : registry().memories) {
    if (begin >= memory->data() && begin + bytes <= memory->data() + memory->size()) {
      return {memory->id(), static_cast<uint64_t>(begin - memory->data())};
    }
  }
  return {};
}

std::byte* address_of(const Place& place) {
  if (place.space == kThisProcess) {
    return reinterpret_cast<std::byte*>(place.offset);
  }
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const SharedMemory* memory : registry().memories) {
    if (memory->id() == place.space) {
      return memory->data() + place.offset;
    }
  }
  return nullptr;
}

}  // namespace smp::comm
