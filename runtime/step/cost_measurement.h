// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "partitioner/cost_model.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// The costs of the configuration's `cost_model`, before the first plan. Collective over the world;
/// the same on every rank: a file is read by world rank 0, and measurements are made there and
/// between the neighbours of its pipeline, in some 50 ms, and rounded to two digits. Throws the
/// errors of reading the file, `ConfigError` if it has links for fewer ranks.
partitioner::CostModel settle_costs(const Runtime& runtime);

}  // namespace smp::runtime
