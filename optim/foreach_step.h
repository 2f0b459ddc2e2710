// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <typeinfo>

namespace smp::optim {

/// Tells of a tensor whether its numbers are on another rank.
using IsAbsent = std::function<bool(const at::Tensor&)>;

/// Does the step of libtorch's SGD, Adam, AdamW, Adagrad or RMSprop, whose class `type` is, on
/// lists of parameters (`optim/list_program.h`): on a GPU in one kernel for some 70 parameters,
/// elsewhere in some ten for up to a hundred, instead of eight for each. Options and states are
/// libtorch's, made and counted as by its own step, and parameters and states get the same bits.
/// Absent parameters are passed over.
///
/// Returns false, and nothing is done, where the optimizer's own step has to do it: for another
/// class, also one that derives from these; if no parameter has a gradient; and if one that has is
/// on the CPU, of a dtype that does not fit lists, has a sparse gradient, shares memory with
/// another or lacks something in its state.
bool foreach_step(torch::optim::Optimizer& optimizer, const std::type_info& type,
                  const IsAbsent& is_absent);

}  // namespace smp::optim
