// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "runtime/run_state.h"
#include "smp/detail/step_call.h"

namespace smp::runtime {

/// Why a step function whose batch is cut must be given a tensor that it captures: it looks like
/// the batch, and each microbatch would get the whole of it. The end of a sentence; empty if it may
/// be captured. Numbers may, and tensors that are the same for all microbatches by the words of the
/// program or a step function.
std::string why_not_captured(const detail::StepCall& call, const StepInputs& known,
                             const at::Tensor& tensor);

}  // namespace smp::runtime
