// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <vector>

#include "graph/graph.h"

namespace smp::graph {

/// The writes to memory that a backward needs which the program has called before.
///
/// The program's backward is over when it writes; a pipeline's comes when the whole forward has
/// run. So the write must go to memory of its own, whatever autograd would have noticed of it: see
/// `Segment`. For operators in their order.
class LateWrites {
 public:
  explicit LateWrites(const Graph& graph);

  /// The alias sets that move to other memory before the operator writes them.
  std::vector<int> moved_by(const Operator& op);

 private:
  struct Set {
    std::vector<int> saved_after;  // ascending: how many backwards came before each operator that
                                   // may save it
    int moved_after = 0;           // how many before it moved last
  };
  std::vector<Set> sets_;  // empty: no operator comes after a backward
};

constexpr int kNeverSeparated = std::numeric_limits<int>::max();

/// Per alias set: how many backwards come before the first operator that moves it to other memory;
/// `kNeverSeparated`.
std::vector<int> sets_to_separate(const Graph& graph);

}  // namespace smp::graph
