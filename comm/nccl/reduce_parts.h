// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "smp/reduce_op.h"

namespace smp::comm {

/// ((parts[0] op parts[1]) op parts[2]) ... of two parts or more, by the operators of the device on
/// which they lie: the bits of `reduce_in_order`, which does it on the host.
at::Tensor reduce_parts(const std::vector<at::Tensor>& parts, ReduceOp op);

}  // namespace smp::comm
