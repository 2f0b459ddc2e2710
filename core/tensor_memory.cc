// SPDX-License-Identifier: Apache-2.0
#include "core/tensor_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>

#include <cstdlib>
#include <memory>

#include "core/env.h"

namespace smp::core {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitizes = true;
#elif defined(__has_feature)
constexpr bool kSanitizes = __has_feature(address_sanitizer);
#else
constexpr bool kSanitizes = false;
#endif

/// Where the start of the block is noted: in front of the memory given out.
void*& block_of(void* data) { return static_cast<void**>(data)[-1]; }

void release(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free(block_of(data));
}

class MallocAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    constexpr size_t kMore = c10::gAlignment + sizeof(void*);
    void* const block = bytes + kMore > bytes ? std::malloc(bytes + kMore) : nullptr;
    // It reports the failure in its own words.
    if (block == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* data = static_cast<void**>(block) + 1;
    size_t space = bytes + c10::gAlignment;
    std::align(c10::gAlignment, bytes, data, space);
    block_of(data) = block;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

void take_tensor_memory_from_malloc() {
  const bool is_default = c10::GetAllocator(c10::kCPU) == c10::GetDefaultCPUAllocator();
  if (kSanitizes || !is_default || env("THP_MEM_ALLOC_ENABLE")) return;
  static auto* const allocator = new MallocAllocator;  // tensors may outlive everything else
  c10::SetAllocator(c10::kCPU, allocator);
}

}  // namespace smp::core
