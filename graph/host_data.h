// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "graph/location.h"
#include "graph/trace.h"
#include "graph/traced_call.h"

namespace smp::graph {

/// Memory whose data host code can write: a factory's result, until an operator writes it, or a
/// small constant.
struct HostMemory {
  ValueId id;
  at::Tensor tensor;     ///< on the same storage
  uint64_t content;      ///< hash of the factory's result; after a read, of the read content
  bool uninitialised;    ///< whether the factory left it so
  bool is_read = false;  ///< whether an operator has read it

  bool changed() const;
  /// Whether an operator that is about to use it for the first time finds the numbers that host
  /// code put there.
  bool filled(bool for_read) const;
};

/// The memory of a run that host code can write. Where operators use it, its content becomes a
/// literal of the run's graph; throws a `CaptureError` where it changes after that.
class HostData {
 public:
  /// From now on host code may fill the factory's result.
  void add_factory(int alias_set, ValueId id, const c10::OperatorHandle& op,
                   const at::Tensor& result);
  /// An operator has read the constants. A large one is looked at once in a run.
  void add_constants(const std::vector<std::pair<ValueId, at::Tensor>>& constants,
                     const RunGraph& run);
  /// Lets go of its tensors.
  void clear() { memories_.clear(); }

  /// Null for other memory.
  const HostMemory* find(int alias_set) const;
  /// A factory's result that the operator of `graph` is the first to use, and that host code has
  /// filled before, unlike when that graph was captured.
  std::optional<ValueId> filled_unlike(const Graph& graph, const Operator& op,
                                       const TracedCall& call, const RunGraph& run) const;
  /// Whether the operator has returned a view of a factory's result, which host code may yet fill.
  bool has_unread_view(const Graph& graph, const Operator& op) const;

  /// The operator writes memory that host code could fill until now: from here on it holds the data
  /// of this run, which the function does not see.
  void settle_written(const Operator& op, RunGraph& run, const Location& location);
  void settle_read(const Operator& op, const TracedCall& call, RunGraph& run,
                   const Location& location);
  void settle_read(ValueId id, RunGraph& run, const Location& location);
  /// The last look, at the end of the run.
  void check_large(const Location& location) const;

 private:
  ska::flat_hash_map<int, HostMemory> memories_;  // data of each alias set
};

}  // namespace smp::graph
