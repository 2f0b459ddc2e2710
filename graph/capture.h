// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph/graph.h"
#include "graph/leaf.h"
#include "graph/location.h"
#include "graph/trace.h"
#include "graph/traced_call.h"

namespace smp::graph {

/// Writes down the operators of a run of a step function, its capture. Operators run here on
/// *concrete* tensors in place of the function's tensors: tensors with the data of this run, or
/// ones of the same shape on the meta device.
class Capture final : public RunGraph {
 public:
  /// Goes on after `prefix`, which the run has done so far.
  Capture(const TraceOptions& options, const Location& location, Graph prefix = {});

  const Graph& graph() const override { return graph_; }
  const Value& value(ValueId id) const override { return graph_.values[id]; }
  bool requires_grad(ValueId id) override { return concrete(id).requires_grad(); }
  void settle(const HostMemory& memory, bool for_read) override;
  void set_user(ValueId id, const at::Tensor& tensor) override;
  void move_data(int alias_set, c10::StorageImpl& storage) override;

  /// The first value on a memory.
  const Value& base(int alias_set) const { return graph_.values[first_aliases_.at(alias_set)]; }
  const at::Tensor& concrete(ValueId id);

  /// Adds a value that no operator made, with `tensor` for its data. One without an alias set gets
  /// a new one.
  ValueId add(Value value, const at::Tensor& tensor);

  /// The operator of a call, with the facts known before it runs.
  Operator make_operator(const TracedCall& call);
  /// Runs it: takes the function's arguments from the stack and leaves concrete results there, with
  /// those that it has written and does not return (`written_results.h`).
  void run(const TracedCall& call, const Operator& op, torch::jit::Stack& stack);
  /// Adds the value of its next result, which may be undefined.
  ValueId add_result(const TracedCall& call, Operator& op, const at::Tensor& result);
  /// Adds the operator. If host code may yet fill its result, that is not compared with a replay's.
  void add(Operator op, bool may_be_filled);

  /// The tensors that the function may still hold of the values.
  std::vector<LiveResult> live_results() const;
  /// Per operator, see `TraceResult`.
  std::vector<uint64_t> checksums() const { return checksums_; }
  /// The whole graph. To be called at the end.
  std::unique_ptr<Graph> finish(const std::vector<ValueId>& outputs,
                                const std::vector<BackwardRoot>& roots);

 private:
  struct Concrete {
    at::Tensor tensor;
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> user;
  };

  ValueId add_value(Value value, at::Tensor concrete);
  void restore_views();
  void forget_dead();
  void push_concrete_arguments(const TracedCall& call, torch::jit::Stack& stack);
  void run_on_concrete(const TracedCall& call, const Operator& op, torch::jit::Stack& stack);
  void run_leaf(const TracedCall& call, const Operator& op, torch::jit::Stack& stack);
  std::vector<at::Tensor> run_leaf_on_data(const LeafCall& leaf, const Operator& op,
                                           torch::jit::Stack& stack);
  uint64_t checksum(const Operator& op);
  void check_late_writes() const;
  void check_written_parameters() const;
  void check_buffers() const;
  void assign_scopes();

  const TraceOptions& options_;
  const Location& location_;
  Graph graph_;
  std::vector<Concrete> concrete_;                  // tensor of each value
  std::unordered_map<int, ValueId> first_aliases_;  // first value of each alias set
  // Alias sets that began with undefined content, which need not be the same in another run.
  ska::flat_hash_set<int> uninitialised_;
  int random_count_ = 0;
  std::vector<uint64_t> checksums_;
};

}  // namespace smp::graph
