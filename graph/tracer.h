// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/node.h"
#include "graph/graph.h"
#include "graph/graph_map.h"
#include "graph/intercept.h"
#include "graph/random.h"
#include "graph/tensor_table.h"
#include "graph/traced_call.h"
#include "graph/weak_map.h"
#include "graph/whole_tensors.h"

namespace smp::graph {

struct TraceOptions {
  std::string step_name;               ///< the step function's name in errors
  const TensorTable* table = nullptr;  ///< parameters and buffers by identity
  /// Takes the tensors that the run makes from nothing else; may be null.
  WholeTensors* wholes = nullptr;
  /// Why a tensor made outside must be an input and no constant, as the end of a sentence; empty if
  /// it may be one. Null: all may.
  std::function<std::string(const at::Tensor&)> why_no_constant;
  /// True: operators run on the inputs' data. False: shapes only, no operator is executed. The
  /// function gets tensors without data either way.
  bool execute = false;
  RandomKey random;  ///< for `execute`
  /// Graphs that the run may turn out to be equal to; none with `execute`.
  std::vector<const Graph*> candidates;
};

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

class Capture;
class Guard;
struct RunningModule;

/// Runs a step function on one microbatch and finds out which operators it calls.
///
/// The function works on *placeholders*, tensors that have a shape and no data, so that it cannot
/// depend on data unnoticed. As long as the run follows one of the candidates (same operators,
/// constants and data flow) it only *guards*: nothing is executed or captured. Where it leaves
/// the last of them it goes on *capturing*, on shapes. So the function runs exactly once either
/// way. With `execute`, the operators that it captures also run, on tensors with data that the
/// function never sees. See docs/capture.md.
///
/// A tracer belongs to the thread that made it.
class Tracer final : public OperatorInterceptor {
 public:
  explicit Tracer(TraceOptions options);
  ~Tracer() override;

  /// Calls `function` with placeholders of `inputs`; it returns the tensors that the step returns,
  /// of which it may have kept another reference each, in the step's result. With `execute`,
  /// operators work on `inputs` themselves, in place too. Throws `CaptureError` for code that
  /// cannot be captured.
  using Function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
  TraceResult run(const std::vector<at::Tensor>& inputs, const Function& function);

  /// The tracer whose `run` is under way on this thread, or nullptr.
  static Tracer* current();

  /// Notes `backward(tensors, gradients)`; to be called by the model inside the function.
  void backward(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& gradients);

  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void custom_function() override;
  [[noreturn]] void retain_grad() override;
  std::optional<torch::autograd::variable_list> differentiate(const BackwardPass& pass) override;

 private:
  struct Known {
    ValueId id = kUndefined;
    bool requires_grad = false;  // when an operator last returned it
  };
  // A tensor whose data host code can write: a factory's result, until an operator writes it, and
  // small constants.
  struct HostData {
    ValueId id;
    at::Tensor tensor;     // on the same storage
    uint64_t content;      // hash of the factory's result; after a read, of the read content
    bool uninitialised;    // whether the factory left it so
    bool is_read = false;  // whether an operator has read it

    bool changed() const;
    bool filled(bool for_read) const;
  };

  ExecutionMode mode() const;  // in which the function calls an operator now
  const Value& value(ValueId id) const;
  std::string module_path(const RunningModule& module) const;
  // Notes that the module of the operator of that number in the graph is known.
  void note_module(size_t index);
  // The module that is running, or, where that is not known, of the parameter that was read last.
  std::string last_scope() const;
  std::string where() const;
  [[noreturn]] void refuse(const std::string& what, const std::string& remedy) const;

  void define_inputs(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& passed);
  ValueId add_value(Value value, const at::Tensor& tensor);
  at::Tensor tensor_for(ValueId id);
  void bind(const at::Tensor& tensor, ValueId id);
  ValueId lookup(const at::Tensor& tensor);
  at::Tensor find_shallow_copy(const at::Tensor& tensor) const;
  ValueId find_alias(const at::Tensor& tensor);
  ValueId derive(const at::Tensor& tensor, const char* name, torch::jit::Stack arguments);
  ValueId define_from_table(const TensorTable::Entry& entry);
  ValueId define_constant(const at::Tensor& tensor);
  void check_may_be_constant(const at::Tensor& tensor) const;
  void check_hooks() const;
  bool changed_by_hand(const at::Tensor& tensor, const Known& known) const;
  ValueId require_grad(const at::Tensor& tensor, const at::Tensor& as_before);
  at::Tensor end_of(const torch::autograd::Edge& edge);
  void check_history(const at::Tensor& tensor) const;

  void collect(const c10::OperatorHandle& op, const torch::jit::Stack& stack, TracedCall& call);
  void watch_custom_function(const TracedCall& call);
  void make_offset_relative(TracedCall& call) const;
  Argument collect_argument(const c10::IValue& value, TracedCall& call);
  bool share_storage(ValueId a, ValueId b) const;
  void keep_roots(const TracedCall& call);
  ValueId keep_root(ValueId root, bool with_history);
  bool answer_host_value(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  bool is_host_data(const torch::jit::Stack& stack, size_t arguments) const;
  void refuse_cumulative_average(const at::Tensor& read) const;
  bool differ(const at::Tensor& a, const at::Tensor& b);
  void refuse_unsupported(const TracedCall& call);
  void refuse_torch_script() const;
  void refuse_replaced_storage(const std::string& name) const;
  void refuse_views_in_place(const TracedCall& call) const;
  void check_keeps_shape(const TracedCall& call, const at::Tensor& argument,
                         const at::Tensor& result) const;
  [[noreturn]] void refuse_new_shape(const std::string& name,
                                     const TensorTable::Entry& entry) const;
  void refuse_views_beyond(const TracedCall& call);
  void refuse_grad_through_leaf(const TracedCall& call);

  bool guard(const TracedCall& call, torch::jit::Stack& stack);
  void push_captured_results(const TracedCall& call, const Operator& op, torch::jit::Stack& stack);
  void start_capture(std::string difference);
  std::unique_ptr<Capture> make_capture(Graph prefix) const;

  void capture(const TracedCall& call, torch::jit::Stack& stack);
  void check_writes(const Operator& op) const;
  at::Tensor capture_result(const TracedCall& call, Operator& op, const at::Tensor& result);
  at::Tensor stand_in(const TracedCall& call, ValueId id, int is_argument);
  void follow(const at::Tensor& tensor, const TensorMeta& meta);
  void spread_history(const Operator& op);
  void note_history(const at::Tensor& tensor);
  void end_histories();
  int alias_set_of(const at::Tensor& tensor) const;

  std::optional<ValueId> filled_by_host(const Graph& graph, const TracedCall& call,
                                        const Operator& op) const;
  void note_factory(ValueId id, const c10::OperatorHandle& op, const at::Tensor& result);
  void note_constant(ValueId id, const at::Tensor& tensor);
  void settle(HostData& data, bool for_read);
  void settle_written(const Operator& op);
  void settle_read(const TracedCall& call, const Operator& op);
  void settle_read(ValueId id);
  void settle_end(ValueId id);
  bool views_unread_host_data(const Operator& op) const;
  void check_unchanged(const HostData& data) const;
  void withhold(int alias_set);

  std::vector<at::Tensor> run_function(const Function& function,
                                       const std::vector<at::Tensor>& inputs);
  void let_go();
  std::vector<ValueId> left_behind(const std::vector<at::Tensor>& outputs) const;
  TraceResult finish(const std::vector<at::Tensor>& outputs);

  TraceOptions options_;
  // One of the two at a time: the run follows known graphs, or is captured.
  std::unique_ptr<Guard> guard_;
  std::unique_ptr<Capture> capture_;
  std::string difference_;  // where the last known graph was left
  std::vector<BackwardRoot> roots_;
  std::vector<at::Tensor> root_tensors_;  // a later write copies them (`keep_roots`)
  std::string script_operator_;           // that TorchScript called
  int backwards_ = 0;                     // how often the function has called `backward`
  std::vector<ValueId> outputs_;
  bool history_begins_ = false;        // the operator at hand gave a first history
  std::vector<at::Tensor> histories_;  // buffers that have got one, which ends with the run
  ValueId last_parameter_ = kUndefined;
  std::vector<bool> modules_known_;               // whether each operator's is known, up to the end
  const c10::OperatorHandle* reading_ = nullptr;  // the operator whose arguments are looked up
  TracedCall spare_call_;                         // keeps the memory of the last call for the next
  torch::autograd::Node* history_ = nullptr;      // history of all placeholders
  // The ends of the histories of parameters and variables, by which `autograd::grad` names them.
  std::vector<core::NodePtr> ends_;
  bool custom_function_ = false;             // one was applied in this run, with gradients on
  std::vector<at::Tensor> inner_arguments_;  // arguments that may have got their own history

  WeakMap<c10::TensorImpl, Known> known_;
  // The last value on a storage.
  struct OnStorage {
    ValueId id = kUndefined;
    int64_t offset = 0;
  };
  WeakMap<c10::StorageImpl, OnStorage> storages_;
  ska::flat_hash_map<int, HostData> host_data_;  // data of each alias set
};

}  // namespace smp::graph
