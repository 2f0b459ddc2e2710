// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/refusal.h"
#include "graph/graph.h"
#include "graph/graph_map.h"

namespace smp::graph {

/// The axis of a value that has none.
constexpr int kNoAxis = -1;

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

/// A graph that does the same to the samples of several microbatches at once as another one does to
/// each microbatch.
struct Coalesced {
  Graph graph;
  /// From a microbatch: one operator or `factor` stand for each.
  GraphMap map;

  /// How many operators of the original run once for all microbatches.
  size_t run_once() const;
};

/// Builds the coalesced graph. `one` and `many` are captures of one function, on a microbatch and
/// on the samples of `factor` of them; `axes` is the result of `nn::rewrite::find_batch_axes` (no
/// refusal).
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
