// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optim/state_dict.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// Which ranks of a tensor-parallel group get the states of whole parameters. Internal.
enum class JoinOn {
  kAll,  ///< each has them all
  kOne,  ///< for all; undivided ones, and the names in the groups, are on the first
};

/// Puts the states of this rank's parts of parameters, by name, together with those of the other
/// ranks of its tensor-parallel group: fields with the sizes of the part become the whole's, others
/// stay. Collective over the group. Throws `UsageError` on all of its ranks where they have other
/// states. Internal.
void join_states_of_parts(const Runtime& runtime, OptimizerState& state, JoinOn on);

/// Cuts states of whole parameters, by name, to those of this rank's parts; fields of the sizes of
/// a part stay. Internal.
void cut_states_to_parts(const Runtime& runtime, OptimizerState& state);

}  // namespace smp::runtime
