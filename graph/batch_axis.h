// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/refusal.h"
#include "graph/batch_rules.h"
#include "graph/graph.h"

namespace smp::graph {

/// How an operator may be run for several microbatches at once.
enum class BatchRole : uint8_t {
  kShared,  ///< once: it depends on nothing that differs between microbatches
  kWhole,   ///< once, on all samples: it treats them independently of each other
  kPart,    ///< for each microbatch on its own: nothing is known, or it works across samples
};

/// The effect of a graph's operators on the batch.
struct BatchAxes {
  core::Refusal refusal;        ///< why microbatches cannot be run together at all
  std::vector<BatchRole> role;  ///< role of each operator
  /// The axis of each value along which microbatches follow each other, `kNoAxis` for those that
  /// are the same for all or exist for each on its own.
  std::vector<int> axis;
};

/// Why the graph must not run for several microbatches at once, whatever its operators do to the
/// batch: it calls a leaf module or `autograd::grad`, or writes a tensor that outlives the
/// microbatch (a buffer such as batch norm's averages).
core::Refusal why_not_together(const Graph& graph);

/// Finds out the effect of each operator on the batch, from two captures of one function: `one` of
/// a microbatch, `many` of the samples of `factor` microbatches at once.
///
/// An input is batched where the two differ, all else follows from it in the order of the program,
/// by the rules of `treats_samples_apart`. An operator not known to be independent is taken to be
/// `kPart`, and so is all that follows from it. Operators on a storage that is written in place
/// have one role.
///
/// `refusal` says so if the captures differ in their operators, if nothing is `kWhole`, if a
/// backward does not depend on the batch, or gives the reason of `why_not_together`.
BatchAxes find_batch_axes(const Graph& one, const Graph& many, int factor);

}  // namespace smp::graph
