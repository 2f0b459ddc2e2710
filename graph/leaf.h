// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <any>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "graph/content.h"
#include "graph/graph.h"

namespace smp::graph {

/// One call of a leaf module, which a step runs as it is instead of capturing its operators. It is
/// a constant of the operator
///
///   smp::leaf(Capsule call, str settings, Tensor[] inputs, Tensor[] state, Tensor(a!)[] written)
///
/// that changes at every step: each run of the step function brings the arguments of its own. See
/// docs/capture.md, "Leaf modules".
class LeafCall final : public torch::CustomClassHolder {
 public:
  /// Calls the module with these tensors in place of the arguments'; returns the tensors of its
  /// result, in the order in which their structure holds them.
  using Function =
      std::function<std::vector<at::Tensor>(LeafCall&, const std::vector<at::Tensor>&)>;

  std::string module;    ///< the module's type, by which errors name it
  std::string settings;  ///< plain arguments that make another graph when they change
  std::string numbers;   ///< plain arguments that may change from step to step
  Function function;
  std::vector<at::Tensor> state;    ///< the module's parameters, and the buffers it only reads
  size_t parameters = 0;            ///< how many of `state`, from the first on, are parameters
  std::vector<at::Tensor> written;  ///< buffers of those of its modules that are training
  /// Whether it may write its parameters under no_grad; then they are in `written`, too.
  bool writes_parameters = false;
  bool writes_by_batch = false;  ///< depends on its arguments, which each replica has for itself
  bool on_zeros = false;         ///< runs for the shapes of its results only

  /// The module's result with undefined tensors, from the run that was recorded; empty before it.
  const std::any& result() const { return result_; }
  /// Keeps the first result given and throws `CaptureError` for a later one that is structured
  /// otherwise. `structure` is a text that is equal for results that are alike.
  void keep_result(std::any result, std::string structure);
  /// Takes over the result kept by `recorded`, the same call in another run.
  void keep_result_of(const LeafCall& recorded);

 private:
  std::any result_;
  std::string structure_;
};

using LeafCallPtr = c10::intrusive_ptr<LeafCall>;

/// While it lives, parameters that leaves write on this thread are kept as they were before, and
/// put back at its end. Scopes nest; the innermost one counts.
class LeafWritesScope {
 public:
  LeafWritesScope();
  ~LeafWritesScope();
  LeafWritesScope(const LeafWritesScope&) = delete;
  LeafWritesScope& operator=(const LeafWritesScope&) = delete;

  /// Keeps parameters that have not been kept yet, in the scope that this thread is in, if it is in
  /// one.
  static void keep(const std::vector<at::Tensor>& parameters);

 private:
  LeafWritesScope* outer_;
  ContentScope contents_;
};

/// True for the operator `smp::leaf`.
bool is_leaf(const c10::OperatorHandle& op);

/// The call in the first argument of a leaf operator.
LeafCallPtr leaf_call(const c10::IValue& capsule);

/// Calls the operator `smp::leaf` and returns the result's tensors.
///
/// The module's inner operators record their history as if they were called in place: while it
/// runs, the gradients of its parameters go where those of the operator's `state` arguments go.
/// Throws `CaptureError` if the module writes an input or parameter, if a result shares memory with
/// another or with an argument, and if the result is structured otherwise than the recorded one.
std::vector<at::Tensor> call_leaf(const LeafCallPtr& call, const std::vector<at::Tensor>& inputs);

/// Runs the call on zeros of the given inputs' shapes (nothing for undefined ones), with zeros in
/// place of parameters whose data is elsewhere; returns results, of which only the shapes mean
/// something. Buffers and random generators are left as they were. Throws `CaptureError` if the
/// module cannot run on zeros.
std::vector<at::Tensor> run_leaf_on_zeros(const LeafCallPtr& call,
                                          const std::vector<std::optional<TensorMeta>>& inputs);

/// Throws `CaptureError` unless the results have the sizes and types that were recorded (nothing
/// for undefined ones), on which everything after them was planned.
void check_leaf_results(const LeafCall& call,
                        const std::vector<std::optional<TensorMeta>>& recorded,
                        const std::vector<at::Tensor>& results);

/// Parameters that the history of `results` reaches without passing the tensors that `entered` the
/// leaf, inputs and state, and that are not in `call.state`.
std::vector<at::Tensor> undeclared_parameters(const LeafCall& call,
                                              const std::vector<at::Tensor>& entered,
                                              const std::vector<at::Tensor>& results);

}  // namespace smp::graph
