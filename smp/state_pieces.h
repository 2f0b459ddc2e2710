#pragma once

#include "dp/parameter_slices.h"
#include "optim/state_dict.h"

namespace smp {

/// Cuts the states of whole parameters, by name, to those of this replica's pieces: fields with the
/// parameter's sizes become the piece's elements, others stay. Those of parameters of which it has
/// nothing are left out. Throws `CheckpointError` where a parameter has another shape.
void cut_states(const dp::ParameterSlices& slices, optim::OptimizerState& state);

/// Puts the states of whole parameters together from those of the replicas' pieces, and adds them
/// to `whole`: each replica gets those of some buckets' parameters. Collective over the replicas.
/// Throws `UsageError` for a field that is not as large as the piece, and where replicas differ.
void join_states(const dp::ParameterSlices& slices, const optim::OptimizerState& pieces,
                 optim::OptimizerState& whole);

}  // namespace smp
