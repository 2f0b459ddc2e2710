// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "core/refusal.h"
#include "graph/graph.h"

namespace smp::partitioner {

/// Element i tells whether the program may be cut between operators i and i+1, so that the second
/// part runs on another rank on copies of its inputs. Size: operators - 1.
///
/// A cut is illegal if
///   - a storage that only operators make is written after the cut, and two or more of its
///     aliases that exist before the cut are used after it: as copies they would no longer see
///     each other's writes; or one whose elements overlap (`unfold`);
///   - a storage that holds a parameter, buffer, constant, literal or input is written anywhere,
///     and operators on both sides of the cut touch an alias of it: each rank has its own;
///   - a parameter is read on both sides by operators that autocast casts it for once;
///   - the step function differentiates results of operators on both sides
///     (`graph::differentiated_ranges`).
/// An output or backward root counts as used after every write to its storage.
std::vector<bool> legal_cuts(const graph::Graph& graph);

/// Why the cut between operators `i` and `i+1` is illegal. With several reasons the storage that
/// appears first in the graph gives the text. Found from the rule directly, independently of
/// `legal_cuts`.
core::Refusal why_illegal(const graph::Graph& graph, int i);

/// The same for every cut at once.
std::vector<core::Refusal> why_illegal(const graph::Graph& graph);

/// Per cut: a parameter of which a view (such as the transpose that `linear` makes) would cross
/// as if it were an activation, `graph::kUndefined` if there is none. Such a cut is sound but
/// sends a weight for every microbatch.
std::vector<graph::ValueId> split_weights(const graph::Graph& graph);

}  // namespace smp::partitioner
