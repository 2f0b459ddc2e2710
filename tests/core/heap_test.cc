// SPDX-License-Identifier: Apache-2.0
#include "core/heap.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstring>
#include <memory>
#include <vector>

namespace smp {
namespace {

constexpr int kBlocks = 64;
constexpr size_t kBlock = 1 << 20;
constexpr size_t kStep = kBlocks * kBlock;

/// Takes, writes and frees memory like a step; returns how much of it the C library still holds.
/// That, unlike page faults, depends neither on the size of pages nor on other programs.
size_t kept_of_a_step() {
  std::vector<std::unique_ptr<char[]>> blocks;
  for (int i = 0; i < kBlocks; ++i) {
    blocks.emplace_back(new char[kBlock]);
    std::memset(blocks.back().get(), i, kBlock);
  }
  blocks.clear();
  return mallinfo2().arena;
}

// The oracle is the same program without the call: it keeps little of each step.
TEST(Heap, KeepsWhatAStepFrees) {
  kept_of_a_step();  // the first one adjusts glibc's limits
  EXPECT_LT(kept_of_a_step(), kStep / 8);
  core::keep_freed_memory();
  EXPECT_GE(kept_of_a_step(), kStep);
  EXPECT_GE(kept_of_a_step(), kStep);
  core::return_freed_memory();
  EXPECT_LT(mallinfo2().arena, kStep / 8);
}

}  // namespace
}  // namespace smp
