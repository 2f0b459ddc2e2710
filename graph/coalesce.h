// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "graph/batch_axis.h"
#include "graph/graph.h"
#include "graph/tracer.h"

namespace smp::graph {

/// A graph that does the same to the samples of several microbatches at once as another one does to
/// each microbatch.
struct Coalesced {
  Graph graph;
  int factor = 1;  ///< microbatches of the original that run as one of this graph
  /// The operators that stand for each of the original, one or `factor`.
  std::vector<std::vector<int>> operators;
  /// The values that stand for each of the original; none for one that only exists on all samples.
  std::vector<std::vector<ValueId>> values;

  /// Overrides of the original's constants, as overrides of this graph's.
  std::vector<ConstantOverride> constants(const std::vector<ConstantOverride>& changes) const;
  std::vector<ContentOverride> contents(const std::vector<ContentOverride>& changes) const;
  /// How many operators of the original run once for all microbatches.
  size_t run_once() const;
};

/// Builds the coalesced graph. `one` and `many` are captures of one function, on a microbatch and
/// on the samples of `factor` of them; `axes` is the result of `find_batch_axes` (no refusal).
///
/// Operators of role `kWhole` and `kShared` run once, on `many`'s sizes and `one`'s numbers; where
/// one of role `kPart` reads their results, an `aten::split` cuts it into microbatches, whose
/// backward joins the gradients again; and operators of role `kPart` run for each microbatch as in
/// `one`. So each microbatch keeps a loss of its own, a backward of its own starts from it, and the
/// sum of a parameter's gradients is that of the microbatches, up to rounding.
///
/// The outputs are those of `one`, each `factor` times in the order of the microbatches. Costs of
/// operators are not filled in.
Coalesced coalesce(const Graph& one, const Graph& many, const BatchAxes& axes, int factor);

}  // namespace smp::graph
