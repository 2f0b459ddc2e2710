// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"

namespace smp::comm {

/// ((parts[0] op parts[1]) op parts[2]) ... along the first dimension, by the operators of the
/// device on which they lie: the bits of `reduce_in_order`, which does it on the host.
at::Tensor reduce_parts(const at::Tensor& parts, ReduceOp op);

}  // namespace smp::comm
