// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/histories.h"
#include "graph/host_data.h"
#include "graph/intercept.h"
#include "graph/known_tensors.h"
#include "graph/location.h"
#include "graph/trace.h"
#include "graph/traced_call.h"

namespace smp::graph {

class Capture;
class Guard;

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
  RunGraph& run_graph() const;
  const Value& value(ValueId id) const;
  ExecutionMode mode() const;  // in which the function calls an operator now

  void define_inputs(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& passed);
  std::vector<at::Tensor> run_function(const Function& function,
                                       const std::vector<at::Tensor>& inputs);
  TraceResult finish(const std::vector<at::Tensor>& outputs);

  ValueId lookup(const at::Tensor& tensor);
  ValueId find_alias(const at::Tensor& tensor);
  ValueId derive(const at::Tensor& tensor, const char* name, torch::jit::Stack arguments);
  ValueId require_grad(const at::Tensor& tensor, const at::Tensor& as_before);
  ValueId define_from_table(const TensorTable::Entry& entry);
  ValueId define_constant(const at::Tensor& tensor);
  ValueId add_value(Value value, const at::Tensor& tensor);
  at::Tensor tensor_for(ValueId id);
  at::Tensor end_of(const torch::autograd::Edge& edge);

  void collect(const c10::OperatorHandle& op, const torch::jit::Stack& stack, TracedCall& call);
  bool answer_host_value(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  bool differ(const at::Tensor& a, const at::Tensor& b);

  bool guard(const TracedCall& call, torch::jit::Stack& stack);
  void push_captured_results(const TracedCall& call, const Operator& op, torch::jit::Stack& stack);
  void start_capture(std::string difference);
  void capture(const TracedCall& call, torch::jit::Stack& stack);
  at::Tensor capture_result(const TracedCall& call, Operator& op, const at::Tensor& result);
  void give_factory_result(const Operator& op, ValueId id, const at::Tensor& result);
  at::Tensor stand_in(const TracedCall& call, ValueId id, int is_argument);
  void spread_history(const Operator& op);
  void settle_end(ValueId id);

  void keep_roots(const TracedCall& call);
  ValueId keep_root(ValueId root, bool with_history);
  bool share_storage(ValueId a, ValueId b) const;

  const TraceOptions options_;
  Location location_;
  // One of the two at a time: the run follows known graphs, or is captured.
  std::unique_ptr<Guard> guard_;
  std::unique_ptr<Capture> capture_;
  std::string difference_;  // where the last known graph was left
  KnownTensors known_;
  HostData host_data_;
  RunHistories histories_;
  std::vector<BackwardRoot> roots_;
  std::vector<at::Tensor> root_tensors_;          // a later write copies them (`keep_roots`)
  int backwards_ = 0;                             // how often the function has called `backward`
  const c10::OperatorHandle* reading_ = nullptr;  // the operator whose arguments are looked up
  TracedCall spare_call_;                         // keeps the memory of the last call for the next
  std::string script_operator_;                   // that TorchScript called
};

}  // namespace smp::graph
