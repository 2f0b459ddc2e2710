// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "partitioner/cost_model.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// What the configuration's `cost_model` says, before the first plan. Collective over the world;
/// the same on every rank: a file is read by world rank 0, and what is measured is measured there
/// and between the neighbours of its pipeline, in some 50 ms, and rounded to two digits. Throws
/// what reading the file throws, `ConfigError` if it has links for fewer ranks.
partitioner::CostModel settle_costs(const Runtime& runtime);

}  // namespace smp::runtime
