// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/communicator.h"

namespace smp::runtime {

/// The findings of all ranks of a group: whether some gradient is not finite, and whether there is
/// any gradient.
struct GradientCheck {
  bool found_inf = false;
  bool any = false;
};

/// Looks at the gradients without changing them, one pass over their memory. Collective over
/// `world` (null: this process alone), with one small reduction.
GradientCheck check_gradients(const std::vector<at::Tensor>& gradients, comm::Communicator* world);

/// Multiplies gradients by the reciprocal of `scale`, made in double precision and rounded to
/// float32, with libtorch's kernel: the bits of torch.amp.GradScaler.
void unscale_gradients(const std::vector<at::Tensor>& gradients, double scale);

}  // namespace smp::runtime
