// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/refusal.h"
#include "graph/graph.h"
#include "graph/graph_map.h"
#include "graph/random.h"
#include "graph/tensor_table.h"
#include "graph/whole_tensors.h"

namespace smp::graph {

struct TraceOptions {
  std::string step_name;               ///< the step function's name in errors
  const TensorTable* table = nullptr;  ///< parameters and buffers by identity
  /// Takes the tensors that the run makes from nothing else; may be null.
  WholeTensors* wholes = nullptr;
  /// Why a tensor made outside must be an input and no constant. Null: all may.
  std::function<core::Refusal(const at::Tensor&)> why_no_constant;
  /// True: operators run on the inputs' data. False: shapes only, no operator is executed. The
  /// function gets tensors without data either way.
  bool execute = false;
  RandomKey random;  ///< for `execute`
  /// Graphs that the run may turn out to be equal to; none with `execute`.
  std::vector<const Graph*> candidates;

  /// `table`, which must be set.
  const TensorTable& tensors() const {
    SMP_INTERNAL_ASSERT(table != nullptr, "step function \"", step_name,
                        "\" is traced without a table of its tensors");
    return *table;
  }
};

struct HostMemory;

/// A result of an operator that something may still hold when the step function has returned.
struct LiveResult {
  ValueId id;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< storage of the placeholder
};

/// The findings of one run of a step function.
struct TraceResult {
  /// The candidate that the run equals, or nullptr.
  const Graph* match = nullptr;
  /// The differences from `match`: the rest of the plan stays valid.
  std::vector<ConstantOverride> constants;
  std::vector<ContentOverride> contents;
  /// The new graph if no candidate matched.
  std::unique_ptr<Graph> recorded;
  /// Where the last candidate was left, as text; empty if there was none.
  std::string difference;
  /// A hash of each operator's results right after it ran, with `execute`; 0 where the content is
  /// not determined then (`empty`, a view of memory that host code may yet fill).
  std::vector<uint64_t> checksums;
  /// The live results among the values of `recorded`: see `give_data_to_constants`.
  std::vector<LiveResult> kept;
  /// Values without data that something other than the step's result holds: see `leaves_results`.
  std::vector<ValueId> left;
};

/// The operators and values of a run of a step function so far, whichever way the run is known: it
/// follows known graphs (`Guard`), or is captured (`Capture`).
class RunGraph {
 public:
  virtual ~RunGraph() = default;

  /// A graph that begins with the run so far.
  virtual const Graph& graph() const = 0;
  virtual const Value& value(ValueId id) const = 0;
  /// Whether a value requires a gradient now.
  virtual bool requires_grad(ValueId id) = 0;

  /// Takes memory that host code filled for a literal: an operator uses it for the first time.
  virtual void settle(const HostMemory& memory, bool for_read) = 0;
  /// Sets the function's tensor of a value: when it is gone, nothing can read the value. One that
  /// has data itself, which others may hold, is taken to stay.
  virtual void set_user(ValueId, const at::Tensor&) {}
  /// The run's own tensors of an alias set get the data of `storage`, which loses it.
  virtual void move_data(int /*alias_set*/, c10::StorageImpl& /*storage*/) {}
};

}  // namespace smp::graph
