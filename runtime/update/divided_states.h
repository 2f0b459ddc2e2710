// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "optim/state_dict.h"
#include "runtime/runtime.h"

// States of optimizers, and tensors that lie on ranks as these do: whole, or the part of each
// parameter that this rank updates (`Entry::sharding`). Internal.
namespace smp::runtime {

/// The name of a parameter given that of a piece (`Entry::name_on`); that of a parameter stays.
std::string whole_name(const std::string& name);

/// Cuts states of whole parameters or of this rank's parts to the part that it updates: fields with
/// the sizes of either are cut, others stay. An entry under the name of a piece takes its
/// parameter's name. Those of parameters of which it has nothing are left out. Throws
/// `CheckpointError` where a parameter has another shape.
void cut_states(const Runtime& runtime, OptimizerState& state);

/// Puts states together from those that the ranks along an axis have, which divide parameters last:
/// first replicas, then those of tensor-parallel groups. Each is left those of some of these
/// parameters, with scalars, so that none needs the memory for all. Fields of other sizes than this
/// rank has of the parameter stay. Undivided ones, and the names in the groups, are left to the
/// first. Collective over the ranks. Throws `UsageError` on all of them where their states differ,
/// and for fields of other sizes where replicas divide a parameter.
void join_states(const Runtime& runtime, const core::Axis& over, OptimizerState& state);

}  // namespace smp::runtime
