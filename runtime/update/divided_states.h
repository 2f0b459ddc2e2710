// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "optim/state_dict.h"
#include "runtime/runtime.h"

// States of optimizers, and tensors that lie on ranks as these do: whole, or the part of each
// parameter that this rank updates (`Entry::sharding`). Each field of a state has a sharding of its
// own, which follows from its parameter's and from `FieldLayout`. `OptimizerState::Param::shape`
// says which of a parameter's cuts a state has undergone. Internal.
namespace smp::runtime {

/// How the fields of states lie; those that are not listed are elementwise.
struct StateFields {
  std::string optimizer = {};  ///< its type, for errors
  optim::FieldLayouts layouts = {};
};

/// Finds the states that were made of wholes, of which the first step has left this rank parts, by
/// the sizes of their tensors, and gives them the shapes of these. Returns whether there are some.
bool find_wholes(const Runtime& runtime, const StateFields& fields, OptimizerState& state);

/// Cuts states of whole parameters or of this rank's parts to the part that it updates. Those of
/// parameters of which it has nothing are left out. Throws `CheckpointError` where a parameter or a
/// field has another shape.
void cut_states(const Runtime& runtime, const StateFields& fields, OptimizerState& state);

/// Puts states together from those that the ranks along an axis have, which divide parameters last:
/// first replicas, then those of tensor-parallel groups. Each is left those of some of these
/// parameters, with scalars, so that none needs the memory for all. The states of undivided
/// parameters and the names in the groups are left to the first. Collective over the ranks. Throws
/// `UsageError` on all of them where their states differ, and where fields lie otherwise than
/// `fields` says.
void join_states(const Runtime& runtime, const StateFields& fields, const core::Axis& over,
                 OptimizerState& state);

}  // namespace smp::runtime
