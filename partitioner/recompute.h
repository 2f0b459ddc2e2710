// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/graph.h"

namespace smp::partitioner {

/// Which operators may run on every stage that needs their results instead of on one: they write
/// nothing, draw nothing, need no gradient, and read only values that every rank has (inputs,
/// constants and literals that nothing writes) or results of such operators.
std::vector<bool> repeatable_operators(const graph::Graph& graph);

/// The operators, ascending, that a stage has to run to have `value`, where `have` tells of each
/// operator whether the stage runs it already. Empty if the value cannot be made from repeatable
/// operators, or if that takes longer than sending it on a link between two processes of a host.
/// (That plans do not depend on the links in this keeps them valid on other machines.)
std::vector<int> cheap_recomputation(const graph::Graph& graph, const std::vector<bool>& repeatable,
                                     graph::ValueId value, const std::vector<bool>& have);

}  // namespace smp::partitioner
