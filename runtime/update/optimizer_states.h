// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "partitioner/predict.h"
#include "runtime/job.h"
#include "runtime/living.h"
#include "runtime/parameters/parameter_table.h"

namespace smp::runtime {

class Optimizer;

/// How much state the program's optimizers keep for parameters, for the partitioner's reckoning:
/// nothing where the configuration sets `optimizer_state_factor`. A parameter of no optimizer is
/// given its default, and one of several has the state of each. All ranks take world rank 0's.
/// Collective over the world. Internal.
partitioner::StateFactors agree_on_state_factors(const Job& job, const ParameterTable& table,
                                                 const Living<const Optimizer>& optimizers);

}  // namespace smp::runtime
