// SPDX-License-Identifier: Apache-2.0
// The report of ranks about the memory of their devices.

#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "smp/smp.h"
#include "tests/device/fake_device.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int64_t kMiB = 1 << 20;

at::Tensor mebibytes(int64_t count, int index) {
  return at::empty({count * kMiB}, at::TensorOptions(at::kByte).device(fake_device(index)));
}

/// Other tests have left nothing there but the cache's content.
void empty_cache() { c10::getDeviceAllocator(fake_device().type())->emptyCache(); }

TEST(DeviceMemory, IsThatOfTensorsAndOfTheCache) {
  run_as_threads(1, stages(1), [] {
    set_device(1);
    empty_cache();
    reset_peak_memory();
    const DeviceMemory before = device_memory().value();
    at::Tensor kept = mebibytes(3, 1), freed = mebibytes(2, 1);
    const at::Tensor elsewhere = mebibytes(5, 2);
    freed.reset();
    const DeviceMemory after = device_memory().value();
    EXPECT_EQ(after.device, fake_device(1));
    EXPECT_EQ(after.allocated - before.allocated, 3 * kMiB);
    EXPECT_EQ(after.peak - before.allocated, 5 * kMiB);
    EXPECT_EQ(after.held - before.held, 5 * kMiB);
    EXPECT_EQ(after.total - after.free, after.held);
    reset_peak_memory();
    EXPECT_EQ(device_memory()->peak, after.allocated);
    empty_cache();
    EXPECT_EQ(device_memory()->held, after.allocated);
  });
}

TEST(DeviceMemory, TheReportHasARowForEachRank) {
  const FakeMemoryLimit limit(64 * kMiB);
  std::vector<std::string> reports(2);
  run_as_threads(2, stages(2), [&] {
    set_device(2 + rank());
    const at::Tensor kept = mebibytes(8 + rank(), 2 + rank());
    if (rank() == 0) empty_cache();
    smp::barrier();
    reset_peak_memory();
    reports[rank()] = memory_report();
  });
  EXPECT_EQ(reports[0], reports[1]);
  EXPECT_EQ(reports[0],
            "  rank  device  allocated     peak     held      free        of\n"
            "  ----  ------  ---------  -------  -------  --------  --------\n"
            "     0  fake:2    8.0 MiB  8.0 MiB  8.0 MiB  56.0 MiB  64.0 MiB\n"
            "     1  fake:3    9.0 MiB  9.0 MiB  9.0 MiB  55.0 MiB  64.0 MiB\n");
}

TEST(DeviceMemory, ThereIsNothingToSayOnTheCpu) {
  run_as_threads(2, stages(2), [] {
    EXPECT_FALSE(device_memory().has_value());
    reset_peak_memory();
    EXPECT_EQ(memory_report(), "");
  });
}

}  // namespace
}  // namespace smp::testing
