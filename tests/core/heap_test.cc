#include "core/heap.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <memory>
#include <vector>

namespace smp {
namespace {

constexpr int kBlocks = 64;
constexpr size_t kBlock = 1 << 20;

long page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

/// Takes, writes and frees what a step might; returns the faults that it cost.
long faults_of_a_step() {
  const long before = page_faults();
  std::vector<std::unique_ptr<char[]>> blocks;
  for (int i = 0; i < kBlocks; ++i) {
    blocks.emplace_back(new char[kBlock]);
    std::memset(blocks.back().get(), i, kBlock);
  }
  return page_faults() - before;
}

// The oracle is the same program without the call: it faults for most pages of each step.
TEST(Heap, KeepsWhatAStepFrees) {
  constexpr long kPages = kBlocks * kBlock / 4096;
  faults_of_a_step();
  EXPECT_GT(faults_of_a_step(), kPages / 2);
  keep_freed_memory();
  faults_of_a_step();
  EXPECT_LT(faults_of_a_step(), kPages / 20);
  return_freed_memory();
  EXPECT_GT(faults_of_a_step(), kPages / 2);
}

}  // namespace
}  // namespace smp
