// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/ordered_dict.h>

#include <string>

#include "optim/state_dict.h"
#include "smp/detail/optimizer_traits.h"

namespace smp::optim {

/// Names for the tensors of `dict` (a module's `named_parameters()`); the first of a tied one's.
inline ParameterNames parameter_names(const torch::OrderedDict<std::string, at::Tensor>& dict) {
  ParameterNames names;
  for (const auto& item : dict) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  return names;
}

/// A copy of an optimizer's state.
inline OptimizerState get_state(const torch::optim::Optimizer& optimizer,
                                const ParameterNames& names) {
  return copy_of(share_state(optimizer, names));
}

/// Restores the state of an optimizer whose parameters' states are as its traits say.
template <class Optimizer>
void set_state(Optimizer& optimizer, const OptimizerState& state, const ParameterNames& names) {
  set_state(optimizer, state, names, detail::param_state_factory(optimizer));
}

}  // namespace smp::optim
