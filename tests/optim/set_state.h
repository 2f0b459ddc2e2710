// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optim/state_dict.h"
#include "smp/detail/optimizer_traits.h"

namespace smp::optim {

/// Restores the state of an optimizer whose parameters' states are as its traits say.
template <class Optimizer>
void set_state(Optimizer& optimizer, const OptimizerState& state, const ParameterNames& names,
               Names common = Names::kSame) {
  set_state(optimizer, state, names, common, detail::param_state_factory(optimizer));
}

}  // namespace smp::optim
