// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "nn/rewrite/call.h"

namespace smp::nn::rewrite {

/// Whether ranks that run an operator on their parts compute the operator on the whole: with
/// arguments that lie as the call says, each rank's results are its parts of the whole's results
/// (or their terms, or all of them) in the given layouts, and the same holds for the gradients that
/// go back to the arguments. The call is one of the divided graph: sizes and numbers are a rank's.
///
/// A pure function of the operator and the layouts. It knows nothing of wishes and costs, for which
/// rules choose among what is legal.
bool is_legal(const Call& call, const std::vector<Layout>& results);

/// The layouts in which an operator makes its results, one for each: the first that is legal among
/// whole, shared, partial and those divided in as many blocks as some argument. Whole if none is.
std::vector<Layout> legal_results(const Call& call);

/// The layouts of a divided graph's values, as `Call`s of the graph ask for them.
Layouts layouts_in(const graph::Graph& divided, std::vector<Layout> of);

/// True for an operator of the tensor-parallel group (`smp::tp_*`).
bool is_collective(const graph::Operator& op);

}  // namespace smp::nn::rewrite
