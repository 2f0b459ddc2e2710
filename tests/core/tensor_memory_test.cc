// SPDX-License-Identifier: Apache-2.0
#include "core/tensor_memory.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/heap.h"

namespace smp {
namespace {

constexpr int kOperators = 100;
constexpr int64_t kElements = 1 << 16;

/// The work of a step on the heap: a forward pass keeps tensors of several sizes, and objects
/// beside them, which a backward pass frees from the last on. Returns the bytes that were kept.
size_t run_step() {
  std::vector<torch::Tensor> saved;
  std::vector<std::unique_ptr<char[]>> objects;
  size_t kept = 0;
  for (int i = 0; i < kOperators; ++i) {
    saved.push_back(torch::empty({(1 + i % 4) * kElements}));
    kept += saved.back().nbytes();
    const auto temporary = torch::empty({(1 + i % 3) * kElements});
    for (int j = 0; j < 4; ++j) objects.emplace_back(new char[40 + 8 * j]);
  }
  while (!saved.empty()) {
    const auto gradient = torch::empty({kElements});
    saved.pop_back();
    objects.resize(objects.size() - 4);
    const auto temporary = torch::empty({2 * kElements});
  }
  return kept;
}

/// The oracle is the most memory in use. With libtorch's own memory and glibc 2.36 the heap takes a
/// quarter more.
TEST(TensorMemory, IsThatOfTheLastStep) {
  core::keep_freed_memory();
  core::take_tensor_memory_from_malloc();
  const size_t before = mallinfo2().arena;
  size_t kept = 0;
  for (int step = 0; step < 20; ++step) kept = run_step();
  const size_t grown = mallinfo2().arena - before;
  EXPECT_GT(grown, kept / 2);  // freed memory is kept
  EXPECT_LT(static_cast<double>(grown), 1.05 * static_cast<double>(kept));
}

TEST(TensorMemory, IsAlignedAndWhole) {
  core::take_tensor_memory_from_malloc();
  c10::Allocator& allocator = *c10::GetAllocator(c10::kCPU);
  EXPECT_NE(&allocator, c10::GetDefaultCPUAllocator());
  for (size_t bytes = 1; bytes < 300; ++bytes) {
    const auto memory = allocator.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % 64, 0u);
    std::fill_n(static_cast<char*>(memory.get()), bytes, 'x');
    void* const raw = allocator.raw_allocate(bytes);
    std::fill_n(static_cast<char*>(raw), bytes, 'y');
    EXPECT_EQ(static_cast<char*>(memory.get())[bytes - 1], 'x');
    allocator.raw_deallocate(raw);
  }
  EXPECT_EQ(allocator.allocate(0).get(), nullptr);
  auto tensor = torch::arange(3);
  tensor.resize_({1000});
  EXPECT_EQ(tensor[2].item<int64_t>(), 2);
}

TEST(TensorMemory, SaysWhatThereIsNotEnoughOf) {
  core::take_tensor_memory_from_malloc();
  c10::Allocator& allocator = *c10::GetAllocator(c10::kCPU);
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  EXPECT_THROW(allocator.allocate(kMost), c10::Error);
  try {
    allocator.allocate(kMost / 4);
    FAIL() << "an exabyte was allocated";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("you tried to allocate"), std::string::npos)
        << error.what();
  }
}

struct Own final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return c10::GetDefaultCPUAllocator()->allocate(bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

TEST(TensorMemory, IsLeftToAProgramThatHasAnAllocator) {
  c10::Allocator* const before = c10::GetAllocator(c10::kCPU);
  Own own;
  c10::SetAllocator(c10::kCPU, &own);
  core::take_tensor_memory_from_malloc();
  EXPECT_EQ(c10::GetAllocator(c10::kCPU), &own);
  c10::SetAllocator(c10::kCPU, before);
}

}  // namespace
}  // namespace smp
