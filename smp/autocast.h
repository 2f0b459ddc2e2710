// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include "smp/export.h"

namespace smp::amp {

/// torch.autocast for C++: while it lives, operators on tensors of `device` that this thread calls
/// compute in `dtype` where libtorch holds that to be safe. Used inside a step function or around
/// code to be compared with one; scopes nest.
class [[nodiscard]] SMP_API Autocast {
 public:
  explicit Autocast(at::ScalarType dtype, at::DeviceType device = at::kCPU, bool enabled = true);
  /// Restores the earlier mode. The outermost scope also forgets the parameters that were cast in
  /// it.
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  bool was_enabled_;
  at::ScalarType dtype_before_;
};

}  // namespace smp::amp
