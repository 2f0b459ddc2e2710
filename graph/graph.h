// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

namespace smp::graph {

/// Index of a value in `Graph::values`.
using ValueId = int32_t;
/// Stands for an undefined tensor among an operator's arguments or results.
constexpr ValueId kUndefined = -1;

/// The properties of a tensor that are known without its data.
struct TensorMeta {
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool requires_grad = false;

  static TensorMeta of(const at::Tensor& tensor);

  int64_t numel() const;
  /// Bytes of the elements, not of the storage.
  int64_t nbytes() const;
  /// "f32[8, 16]" and, where the strides are not the contiguous ones, "f32[8, 16]{1, 8}".
  std::string to_string() const;
  bool operator==(const TensorMeta& other) const;
};

enum class ValueKind : uint8_t {
  kInput,      ///< a tensor argument of the step function, cut to one microbatch
  kParameter,  ///< a parameter of a DistributedModel
  kBuffer,     ///< a buffer of a DistributedModel
  kConstant,   ///< a tensor made outside the step function; its content is kept
  kLiteral,    ///< made inside from host data (`torch::tensor(vector)`); may change at each step
  kResult,     ///< the result of an operator
};

const char* to_string(ValueKind kind);

/// One tensor of the graph, in SSA form: an operator that writes its argument in place has a
/// result of its own, which shares the argument's `alias_set`.
struct Value {
  ValueKind kind = ValueKind::kResult;
  std::string name;  ///< inputs "0", "1" ...; parameters and buffers: dotted path
  TensorMeta meta;
  int producer = -1;   ///< index of the operator that makes it; -1 for the other kinds
  int alias_set = -1;  ///< values with the same number share their storage
  at::Tensor content;  ///< kConstant and kLiteral only
};

/// One argument of an operator: a constant, or one or more values.
struct Argument {
  enum class Kind : uint8_t { kConstant, kTensor, kTensorList, kOptionalTensorList };
  Kind kind = Kind::kConstant;
  c10::IValue constant;                 ///< kConstant only
  c10::SmallVector<ValueId, 1> values;  ///< one for kTensor; kUndefined where undefined
};

/// The modes an operator ran under and is replayed under: libtorch's of the thread, its default
/// floating point type, which is one for all threads, and the step function's settings.
struct ExecutionMode {
  bool grad = true;
  bool inference = false;
  /// Autograd, and the tracking of views, are excluded from the dispatcher
  /// (`at::AutoDispatchBelowAutograd`, `at::AutoDispatchBelowADInplaceOrView`).
  bool below_autograd = false;
  bool below_views = false;
  /// Autocast of the CPU's tensors, and of the accelerator's (`accelerator_type`).
  bool autocast_cpu = false;
  bool autocast_accelerator = false;
  at::ScalarType autocast_cpu_dtype = at::kBFloat16;
  at::ScalarType autocast_accelerator_dtype = at::kHalf;
  at::ScalarType default_dtype = at::kFloat;
  /// Autocast casts a parameter once for all its uses in a scope; else once for each.
  bool autocast_cache = true;
  /// How many calls of `backward` came before it, whose gradients it cannot change
  /// (`late_writes.h`).
  int after_backward = 0;
  /// Where the operator is to run: the partition (rank of the pipeline) that the innermost
  /// `PartitionScope` asked for; -1: anywhere.
  int partition = -1;

  static ExecutionMode current();
  /// Whether operators record a history for gradients.
  bool records_history() const { return grad && !inference && !below_autograd; }
  /// Whether operators do the same under both; `after_backward` and `partition` do not count.
  bool runs_like(const ExecutionMode& other) const;
  bool operator==(const ExecutionMode& other) const;
  /// "" for the default mode, else for example "no_grad partition 1".
  std::string to_string() const;
};

/// Cost of one operator for one microbatch. Part of the graph: measured on world rank 0,
/// rounded, and the same on every rank.
struct Cost {
  double forward_us = 0;
  double backward_us = 0;
  int64_t output_bytes = 0;  ///< bytes of results with storage of their own
  int64_t saved_bytes = 0;   ///< kept from forward to backward
};

/// One ATen operator as the step function called it.
struct Operator {
  explicit Operator(c10::OperatorHandle handle) : handle(std::move(handle)) {}

  c10::OperatorHandle handle;
  std::vector<Argument> arguments;
  /// One per returned tensor; the elements of a returned list follow each other.
  c10::SmallVector<ValueId, 2> results;
  /// Per result: which tensor argument (counted over all arguments' values) it is the very same
  /// tensor as, as in-place operators and a `to` that does nothing return; -1 for a new tensor.
  c10::SmallVector<int, 2> result_is_argument;
  /// Per returned value of the schema: the length of a returned list, -1 for a single tensor.
  c10::SmallVector<int, 2> list_lengths;
  /// Alias sets whose storage the operator writes.
  c10::SmallVector<int, 1> writes;
  ExecutionMode mode;
  bool reads_parameter = false;  ///< directly, not through a view
  std::string scope;             ///< dotted path of the module it ran in, as far as known
  int random_ordinal = -1;       ///< how many random operators came before it; -1 if not random
  ValueId first_result = 0;      ///< number of values that existed before it was recorded
  Cost cost;

  std::string name() const;  ///< "aten::addmm"
};

/// A tensor on which the step function called `backward`, with the gradient it gave.
struct BackwardRoot {
  ValueId value = kUndefined;
  ValueId gradient = kUndefined;  ///< kUndefined: ones
  ExecutionMode mode;             ///< mode of the call, under which the backward pass runs

  bool operator==(const BackwardRoot& other) const {
    return value == other.value && gradient == other.gradient && mode == other.mode;
  }
};

/// The operations of a step function on one microbatch: a list of operators in program order.
class Graph {
 public:
  std::vector<Value> values;
  std::vector<Operator> operators;
  std::vector<ValueId> inputs;      ///< inputs by position among the flattened tensor arguments;
                                    ///< kUndefined for an argument never used
  std::vector<ValueId> outputs;     ///< the flattened tensors the function returned
  std::vector<BackwardRoot> roots;  ///< empty: the function does not train
  int alias_sets = 0;

  bool trains() const { return !roots.empty(); }

  /// The device other than the CPU on which it computes, if there is one.
  at::Device device() const;

  /// True if host code filled the operator's result (`torch::tensor(vector)`): it is not run again,
  /// its result is the literal's content.
  bool makes_literal(const Operator& op) const {
    return op.results.size() == 1 && op.results[0] != kUndefined &&
           values[op.results[0]].kind == ValueKind::kLiteral;
  }

  /// The graph as text, one operator a line; equal graphs have equal texts. Costs and the
  /// content of constants are left out.
  std::string to_string() const;
  /// One line of `to_string()`.
  std::string line(size_t operator_index) const;

  /// Hash of operators, data flow, shapes and names; patchable constants are left out.
  uint64_t fingerprint() const;
  /// Hash of the patchable constants and of constant and literal tensors' contents.
  uint64_t constants_fingerprint() const;
};

/// True if argument `index` of the operator may change from step to step without changing the
/// graph: a number such as a loss weight or a dropout probability, in an operator whose result
/// shapes cannot depend on it.
bool is_patchable(const c10::FunctionSchema& schema, size_t index);

/// Short text of a constant: "1.5", "[2, 3]", "None", "cpu".
std::string constant_to_string(const c10::IValue& value);

}  // namespace smp::graph
