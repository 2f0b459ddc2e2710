// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "pipeline/action.h"

namespace smp::pipeline {

/// The index of the edge that a transfer goes over, whichever way; `edges.size()` if there is none.
/// An `Edge` has its stages as `from` and `to`, of which `from` is the earlier.
template <class Edge>
size_t edge_of(const Action& transfer, const std::vector<Edge>& edges) {
  const auto [from, to] = std::minmax(transfer.stage, transfer.peer);
  const auto found = std::find_if(
      edges.begin(), edges.end(),
      [from = from, to = to](const Edge& edge) { return edge.from == from && edge.to == to; });
  return static_cast<size_t>(found - edges.begin());
}

}  // namespace smp::pipeline
