// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "nn/rewrite/divide.h"
#include "nn/rewrite/propagate.h"

namespace smp::nn::rewrite {

/// Writes down the graph that `outcome` describes: operators, values, targets, traffic and costs of
/// the result are filled in, parameters and decisions are not.
DividedGraph build(const Propagation& propagation, const Outcome& outcome,
                   const DivideOptions& options);

}  // namespace smp::nn::rewrite
