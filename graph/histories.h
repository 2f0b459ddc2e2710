// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <string>
#include <utility>
#include <vector>

#include "core/node.h"
#include "graph/graph.h"
#include "graph/location.h"
#include "graph/traced_call.h"

namespace smp::graph {

/// Throws a `UsageError` where the calls of `backward` of a step function get in each other's way:
/// the pipeline runs them as one, when the whole forward has run.
///
/// Where two go over the same operator, the first has freed its saved tensors, as in libtorch. And
/// where an operator between two calls writes in place a tensor that the first needs, it writes a
/// copy (`late_writes.h`), which has no history for the second.
void check_histories(const Graph& graph, const std::string& step_name);

/// The gradient histories of the tensors of a run, as the function sees them. Throws a
/// `CaptureError` where a tensor has got one from no operator.
class RunHistories {
 public:
  /// `location` has to live as long.
  explicit RunHistories(const Location& location);

  /// Lets a tensor of the function show an operator's effects in place.
  void follow(const at::Tensor& tensor, const TensorMeta& meta);
  /// Whether a tensor has got a first history by that since the last call.
  bool take_begun() { return std::exchange(begun_, false); }
  /// The tensor shows memory that has got a history.
  void spread_to(const at::Tensor& tensor);
  /// Calls `body`, for which tensors that outlive the run have no history of it.
  void hide_while(c10::function_ref<void()> body) const;
  /// Keeps the end of a parameter's or variable's history, by which `autograd::grad` names it.
  void keep_end(const at::Tensor& leaf);

  void check_hooks() const;
  /// A custom autograd function is about to be applied.
  void note_custom_function();
  bool has_custom_functions() const { return custom_functions_; }
  void check_not_custom(const at::Tensor& tensor) const;
  void watch_custom_functions(const TracedCall& call);

  /// The last checks, when the function has returned.
  void check_end() const;
  /// Ends the histories with the run, and lets go of its tensors.
  void end();

 private:
  void note(const at::Tensor& tensor);

  const Location& location_;
  torch::autograd::Node& of_placeholders_;
  bool begun_ = false;                  // an operator gave a first history
  std::vector<at::Tensor> registered_;  // parameters and buffers that have got one
  std::vector<core::NodePtr> ends_;     // ends of those of parameters and variables
  bool custom_functions_ = false;       // one was applied in this run, with gradients on
  std::vector<at::Tensor> watched_;     // arguments that may have got their own history
};

}  // namespace smp::graph
