// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// Per alias set: whether an operator writes it after `backward`, and the backward of an earlier
/// one may need what it held.
///
/// The program's backward is over when it writes; a pipeline's comes when the whole forward has
/// run. So the write must go to memory of its own, whatever autograd would have noticed of it: see
/// `Segment`.
std::vector<bool> sets_to_separate(const Graph& graph);

}  // namespace smp::graph
