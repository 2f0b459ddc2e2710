// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/stage.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// Whether losses are multiplied by a scale: of `optimizer.scale_loss`, `fp16`, or
/// `amp::GradScaler`, whose scale is an input of every step. Internal.
bool scales_loss(const Runtime& runtime);

/// Looks at the numbers that the backwards of a step start from, on the ranks that have them: one
/// that is not finite makes parameters that are not, on all replicas. Internal.
///
/// A loss scale switches the watch off: an overflow is part of the plan there, and such a step is
/// skipped. A number on a device is read when the next step ends, when it has long been there, on a
/// stream beside the one that computes.
class LossWatch {
 public:
  /// A step begins; `call` calls of its function came before. Whether it looks at the step.
  bool begin(const Runtime& runtime, uint64_t call);
  /// The step has run its backwards, which started from these: whether one was not finite.
  bool finish(const std::vector<pipeline::StepResults::Loss>& losses);

  /// Warns of it, the first, tenth, hundredth ... time. `bad[r]`: whether replica r had one, too.
  void report(const Runtime& runtime, const std::string& step_name, const std::vector<bool>& bad);

 private:
  struct Root {
    uint64_t call;
    int microbatch;
    at::Tensor value;
  };

  /// One that is not finite, or null.
  static const Root* find_bad(const std::vector<Root>& roots);

  uint64_t call_ = 0;
  std::vector<Root> here_, on_device_, awaited_;
  std::optional<c10::Event> made_;   // after those awaited
  std::optional<c10::Stream> side_;  // one for all steps: an allocator keeps memory for each
  Root found_{};
  int64_t times_ = 0;
};

}  // namespace smp::runtime
