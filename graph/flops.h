// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "graph/graph.h"

namespace smp::graph {

/// Floating point operations of a call forward, a multiplication and an addition as two: of matrix
/// products, convolutions and attention, whose time is theirs. 0 for all others, which take as
/// long as memory does.
double operator_flops(const Graph& graph, const Operator& op);

}  // namespace smp::graph
