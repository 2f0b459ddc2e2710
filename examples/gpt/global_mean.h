#pragma once

#include "smp/step_output.h"

namespace gpt {

/// The mean over the microbatches of all replicas, summed in their global order: the same bits for
/// any number of ranks. `losses` holds a scalar for each microbatch. Collective over the replicas.
double global_mean(const smp::StepOutput& losses);

}  // namespace gpt
