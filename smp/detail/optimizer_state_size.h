// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "smp/export.h"

namespace torch::optim {
class Optimizer;
class OptimizerParamGroup;
}  // namespace torch::optim

namespace smp::optim::detail {

/// How many tensors of a parameter's size an optimizer keeps for each parameter of one of its
/// groups, by the group's options, once it has stepped (LBFGS: once its history is full). None for
/// an optimizer that the library does not know. Internal.
SMP_API std::optional<int64_t> state_tensors(const torch::optim::Optimizer& optimizer,
                                             const torch::optim::OptimizerParamGroup& group);

}  // namespace smp::optim::detail
