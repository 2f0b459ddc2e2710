// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/refusal.h"
#include "graph/coalesce.h"
#include "graph/graph.h"

namespace smp::nn::rewrite {

/// Why the graph must not run for several microbatches at once, whatever its operators do to the
/// batch: it calls a leaf module or `autograd::grad`, or writes a tensor that outlives the
/// microbatch (a buffer such as batch norm's averages).
core::Refusal why_not_together(const graph::Graph& graph);

/// Finds out the effect of each operator on the batch, from two captures of one function: `one` of
/// a microbatch, `many` of the samples of `factor` microbatches at once.
///
/// An input is batched where the two differ, all else follows from it in the order of the program:
/// microbatches are parts of all samples, and what is legal for parts (`is_legal`) treats them
/// independently. An operator not known to do so is taken to be `kPart`, and so is all that follows
/// from it. Operators on a storage that is written in place have one role.
///
/// `refusal` says so if the captures differ in their operators, if nothing is `kWhole`, if a
/// backward does not depend on the batch, or gives the reason of `why_not_together`.
graph::BatchAxes find_batch_axes(const graph::Graph& one, const graph::Graph& many, int factor);

}  // namespace smp::nn::rewrite
