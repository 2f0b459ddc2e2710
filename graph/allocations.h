// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <memory>

namespace smp::graph {

/// While it lives, counts the bytes that this thread has allocated for tensors on the CPU and not
/// freed, and the most that it was. Memory from before is not counted.
class Allocations {
 public:
  Allocations()
      : count_(std::make_shared<Count>()), guard_(c10::DebugInfoKind::PROFILER_STATE, count_) {}

  int64_t now() const { return count_->now; }
  int64_t peak() const { return count_->peak; }

 private:
  struct Count : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* /*data*/, int64_t bytes, size_t /*allocated*/, size_t /*reserved*/,
                           c10::Device /*device*/) override {
      now += bytes;
      peak = std::max(peak, now);
    }
    bool memoryProfilingEnabled() const override { return true; }

    int64_t now = 0, peak = 0;
  };

  std::shared_ptr<Count> count_;
  c10::DebugInfoGuard guard_;
};

}  // namespace smp::graph
