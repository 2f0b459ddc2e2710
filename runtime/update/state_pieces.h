// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

#include "dp/parameter_slices.h"
#include "optim/state_dict.h"

namespace smp::runtime {

/// The name of this replica's piece of parameter `index`, such as "fc.weight[0:64]"; empty where it
/// has none.
std::string piece_name(const dp::ParameterSlices& slices, size_t index);
/// The parameter's name from a piece's; that of a parameter stays.
std::string whole_name(const std::string& name);

/// Gives the states of this replica's pieces, which are under the names of their parameters, those
/// of `piece_name`.
void name_pieces(const dp::ParameterSlices& slices, OptimizerState& state);

/// Cuts the states of whole parameters, by name, to those of this replica's pieces: fields with the
/// parameter's sizes become the piece's elements, others stay. An entry under the name of a piece
/// takes its parameter's name. Those of parameters of which it has nothing are left out. Throws
/// `CheckpointError` where a parameter has another shape.
void cut_states(const dp::ParameterSlices& slices, OptimizerState& state);

/// Puts the states of whole parameters together from those of the replicas' pieces, and adds them
/// to `whole`: each replica gets those of some buckets' parameters. Collective over the replicas.
/// Throws `UsageError` for a field that is not as large as the piece, and where replicas differ.
void join_states(const dp::ParameterSlices& slices, const OptimizerState& pieces,
                 OptimizerState& whole);

}  // namespace smp::runtime
