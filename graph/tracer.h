#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "graph/intercept.h"
#include "graph/leaf.h"
#include "graph/random.h"
#include "graph/requires_grad.h"
#include "graph/tensor_table.h"

namespace smp::graph {

/// A constant of this run that differs from the recorded one, where the graph allows it.
struct ConstantOverride {
  int operator_index;
  int argument;
  c10::IValue value;
};

/// As `ConstantOverride`, for the content of a literal or constant tensor.
struct ContentOverride {
  ValueId value;
  at::Tensor content;
};

struct TraceOptions {
  std::string step_name;               ///< what errors call the step function
  const TensorTable* table = nullptr;  ///< parameters and buffers by identity
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
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< of the placeholder
};

/// What one run of a step function was found to do.
struct TraceResult {
  /// The candidate that the run equals, or nullptr.
  const Graph* match = nullptr;
  /// What differs from `match`: the rest of the plan stays valid.
  std::vector<ConstantOverride> constants;
  std::vector<ContentOverride> contents;
  /// The new graph if no candidate matched.
  std::unique_ptr<Graph> recorded;
  /// Where the last candidate was left, as text; empty if there was none.
  std::string difference;
  /// With `execute`: per operator, a hash of its results right after it ran; 0 where the content
  /// is not determined (`empty`).
  std::vector<uint64_t> checksums;
  /// Of `recorded`, by value: see `give_data_to_constants`.
  std::vector<LiveResult> kept;
  /// Constants of `recorded` whose tensors nobody holds any more: see `check_no_state`.
  std::vector<ValueId> released;
};

/// Runs a step function on one microbatch and finds out which operators it calls.
///
/// The function works on *placeholders*, tensors that have a shape and no data, so that what it
/// does cannot depend on data unnoticed. As long as the run follows one of the candidates (same
/// operators, constants and data flow) it only *verifies*: nothing is executed or recorded. Where
/// it leaves the last of them it goes on *recording*, on shapes. So the function runs exactly once
/// either way. With `execute`, the operators that it records also run, on tensors with data that
/// the function never sees. See docs/capture.md.
///
/// A tracer belongs to the thread that made it.
class Tracer final : public OperatorInterceptor {
 public:
  explicit Tracer(TraceOptions options);
  ~Tracer() override;

  /// Calls `function` with placeholders of `inputs`; it returns the tensors that the step returns.
  /// With `execute`, operators work on `inputs` themselves, in place too. Throws `CaptureError` for
  /// what cannot be captured.
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
  struct Live {
    const Graph* graph;
    std::vector<ConstantOverride> constants;
    std::vector<ContentOverride> contents;
    std::optional<RequiresGrad> requires_grad;  // of the graph, once it is asked for
  };
  struct Known {
    ValueId id;
    bool requires_grad;                             // when an operator last returned it
    c10::weak_intrusive_ptr<c10::TensorImpl> keep;  // keeps the address from being used again
  };
  // What operators run on while recording, in place of what the function holds.
  struct Concrete {
    at::Tensor tensor;
    // The storage of what the function holds: when it is gone, nothing can read the value.
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> user;
  };

  // Tensors of the current call, in the order of its arguments.
  struct Call {
    const c10::OperatorHandle* op;
    std::vector<Argument> arguments;
    std::vector<at::Tensor> tensors;
    std::vector<ValueId> ids;
    bool absolute_offset = false;  // it counted from the start of its argument's storage

    void clear();
  };

  bool verifying() const { return !live_.empty(); }
  ExecutionMode mode() const;  // in which the function calls an operator now
  const Value& value(ValueId id) const;
  std::string last_scope() const;  // the module of the parameter that was read last
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
  void check_hooks() const;
  bool changed_by_hand(const at::Tensor& tensor, const Known& known) const;
  ValueId require_grad(const at::Tensor& tensor, const at::Tensor& as_before);
  at::Tensor end_of(const torch::autograd::Edge& edge);
  void check_history(const at::Tensor& tensor) const;

  void collect(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Call& call);
  void watch_custom_function(const Call& call);
  void make_offset_relative(Call& call) const;
  Argument collect_argument(const c10::IValue& value, Call& call);
  c10::SmallVector<ValueId, 1> written_by(const Call& call) const;
  bool share_storage(ValueId a, ValueId b) const;
  void keep_roots(const Call& call);
  ValueId keep_root(ValueId root);
  bool answer_host_value(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  bool is_host_data(const torch::jit::Stack& stack, size_t arguments) const;
  bool differ(const at::Tensor& a, const at::Tensor& b);
  void refuse_unsupported(const Call& call);
  void refuse_replaced_storage(const std::string& name) const;
  void refuse_views_beyond(const Call& call);
  void refuse_grad_through_leaf(const Call& call);

  bool is_expected(const c10::OperatorHandle& op) const;
  bool verify(Call& call, torch::jit::Stack& stack);
  std::optional<std::string> differs(Live& live, const Call& call, const ExecutionMode& mode) const;
  void push_recorded_results(const Call& call, torch::jit::Stack& stack);
  void leave_candidates(const std::string& difference);
  void restore_views();

  void record(Call& call, torch::jit::Stack& stack);
  const at::Tensor& concrete(ValueId id);
  void forget_dead();
  void run_operator(const Call& call, const Operator& op, torch::jit::Stack& stack);
  void push_concrete_arguments(const Call& call, torch::jit::Stack& stack);
  void run_leaf(const Call& call, const Operator& op, torch::jit::Stack& stack);
  std::vector<at::Tensor> run_leaf_on_data(const LeafCall& leaf, const Operator& op,
                                           torch::jit::Stack& stack);
  void note_writes(const Call& call, Operator& op);
  void note_factory(ValueId id, int alias_set, const at::Tensor& result, bool uninitialised);
  void note_constant(ValueId id, int alias_set, const at::Tensor& tensor);
  void settle_written(const Operator& op);
  void withhold(int alias_set);
  void move_data(int alias_set, c10::StorageImpl& storage);
  void settle_read(const Call& call, const Operator& op);
  void settle_read(ValueId id);
  void record_results(const Call& call, Operator& op, torch::jit::Stack& stack);
  at::Tensor record_result(const Call& call, Operator& op, const at::Tensor& result);
  void follow(const at::Tensor& tensor, const TensorMeta& meta);
  void spread_history(const Operator& op, int index);
  int alias_set_of(const at::Tensor& tensor);
  uint64_t checksum(const Operator& op);

  void check_late_writes() const;
  void check_written_parameters() const;
  std::vector<at::Tensor> run_function(const Function& function,
                                       const std::vector<at::Tensor>& inputs);
  std::vector<ValueId> released_constants();
  TraceResult finish(const std::vector<at::Tensor>& outputs);
  void assign_scopes();

  TraceOptions options_;
  std::vector<Live> live_;
  std::string difference_;
  size_t next_operator_ = 0;
  ValueId value_count_ = 0;       // values known so far, while verifying
  std::vector<Value> pending_;    // values first seen in the call at hand, while verifying
  std::unique_ptr<Graph> graph_;  // what is recorded; while verifying it is empty
  std::vector<uint64_t> checksums_;
  std::vector<BackwardRoot> roots_;
  bool differentiated_ = false;  // the function has called `backward`
  std::vector<ValueId> outputs_;
  int random_count_ = 0;
  bool history_begins_ = false;  // the operator at hand gave a history to what had none
  ValueId last_parameter_ = kUndefined;
  // The tensors that are constants, but for those on memory of others (`from_blob`).
  std::vector<std::pair<ValueId, c10::weak_intrusive_ptr<c10::TensorImpl>>> constants_;
  Call spare_call_;                           // keeps the memory of the last call for the next
  torch::autograd::Node* history_ = nullptr;  // of all placeholders
  // The ends of the histories of parameters and variables, by which `autograd::grad` names them.
  std::vector<std::shared_ptr<torch::autograd::Node>> ends_;
  bool custom_function_ = false;             // one was applied in this run, with gradients on
  std::vector<at::Tensor> inner_arguments_;  // what it may have given a history of its own

  ska::flat_hash_map<const c10::TensorImpl*, Known> known_;
  // Storages seen, each with the last value on it and its alias set.
  struct StorageInfo {
    ValueId id;
    int64_t offset;
    int alias_set;
    c10::weak_intrusive_ptr<c10::StorageImpl> keep;
  };
  ska::flat_hash_map<const c10::StorageImpl*, StorageInfo> storages_;
  // What holds data that host code can write: a factory's result, until an operator writes it, and
  // small constants.
  struct HostData {
    ValueId id;
    at::Tensor tensor;     // on the same storage
    uint64_t content;      // hash of what the factory returned; after a read, of what was read
    bool uninitialised;    // by the factory
    bool is_read = false;  // by an operator

    bool changed() const;
    bool filled(bool for_read) const;
  };
  std::optional<ValueId> filled_by_host(const Graph& graph, const Call& call,
                                        const Operator& op) const;
  void settle(HostData& data, bool for_read);
  void settle_end(ValueId id);
  void make_literal(const HostData& data);
  bool differs_from_literal(const HostData& data) const;
  void check_unchanged(const HostData& data) const;
  ska::flat_hash_map<int, HostData> host_data_;  // by alias set
  // Alias sets that began with undefined content, which need not be the same in another run.
  ska::flat_hash_set<int> uninitialised_;
  // While verifying: contents of this run's literals that are not those recorded.
  std::vector<std::pair<ValueId, at::Tensor>> literals_;
  std::vector<Concrete> concrete_;                  // by value
  std::unordered_map<int, ValueId> first_aliases_;  // while recording: by alias set
};

}  // namespace smp::graph
