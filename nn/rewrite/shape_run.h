// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <set>
#include <vector>

#include "graph/graph.h"

namespace smp::nn::rewrite {

/// One result of an operator that ran on shapes.
struct ShapeResult {
  bool defined = true;
  graph::TensorMeta meta;
  int alias_of = -1;  ///< the tensor argument (counted as in `Operator::result_is_argument`) whose
                      ///< storage it lies on; -1: one of its own
  bool is_argument = false;  ///< the very same tensor
};

/// The results of an operator of `graph`, without computing anything. Throws the operator's errors
/// if the shapes do not fit. Values in `requires_grad` do, though some were made without.
std::vector<ShapeResult> run_on_shapes(const graph::Graph& graph, const graph::Operator& op,
                                       const std::set<graph::ValueId>& requires_grad);

}  // namespace smp::nn::rewrite
