// SPDX-License-Identifier: Apache-2.0
#include "graph/histories.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>

#include "core/check.h"
#include "graph/late_writes.h"
#include "graph/requires_grad.h"
#include "graph/shapes.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

/// The histories over which the calls of `backward` go, call by call.
class Histories {
 public:
  Histories(const Graph& graph, const std::string& step_name)
      : graph_(graph),
        step_name_(step_name),
        requires_grad_(graph),
        separated_since_(sets_to_separate(graph)),
        is_used_up_(graph.operators.size(), false) {}

  void check(int call) {
    call_ = call;
    reached_.assign(graph_.values.size(), false);
    earliest_reached_.assign(graph_.values.size(), RequiresGrad::kNever);
    for (const BackwardRoot& root : graph_.roots) {
      if (root.mode.after_backward == call) reach(root.value);
    }
    for (size_t i = graph_.operators.size(); i-- > 0;) go_over(static_cast<int>(i));
  }

 private:
  void go_over(int index) {
    const Operator& op = graph_.operators[index];
    reach_same_tensors(index);
    if (!records_history(graph_, op) || !is_reached(index)) return;
    check_unused(index);
    for_each_argument(op, [&](ValueId value) { reach_before(index, value); });
  }

  bool is_reached(int index) const {
    const Operator& op = graph_.operators[index];
    return std::any_of(op.results.begin(), op.results.end(), [&](ValueId value) {
      if (value == kUndefined || !graph_.values[value].meta.requires_grad) return false;
      // A later view of written memory leads here through the view operator.
      return reached_[value] || (writes_to(graph_, op, value) &&
                                 earliest_reached_[requires_grad_.family(value)] < index);
    });
  }

  /// An operator that returns one of its arguments passes on the gradients that reach its result.
  void reach_same_tensors(int index) {
    for_each_same_tensor(graph_.operators[index], [&](ValueId result, ValueId argument) {
      if (reached_[result]) reach_before(index, argument);
    });
  }

  void reach_before(int index, ValueId value) {
    if (requires_grad_.since(value) < index) reach(value);
  }

  void reach(ValueId value) {
    reached_[value] = true;
    const Value& reached = graph_.values[value];
    int& earliest = earliest_reached_[requires_grad_.family(value)];
    earliest = std::min(earliest, reached.producer);
    const bool was_moved = reached.alias_set >= 0 && separated_since_[reached.alias_set] <= call_;
    SMP_CHECK_WITH(UsageError, !was_moved, "step function \"", step_name_,
                   "\": between two calls of backward it writes in place a tensor of shape ",
                   at::IntArrayRef(reached.meta.sizes),
                   " that the first may need, and the second goes back through it. Write a new "
                   "tensor: y = y + 1 instead of y.add_(1)");
  }

  void check_unused(int index) {
    const Operator& op = graph_.operators[index];
    SMP_CHECK_WITH(UsageError, !is_used_up_[index], "step function \"", step_name_,
                   "\": backward was called a second time on the history of operator ", index, " (",
                   op.name(), op.scope.empty() ? "" : ", in module \"" + op.scope + "\"",
                   "), which the call before has freed, as in libtorch. Losses that share "
                   "operators are differentiated in one call: model->backward({a, b}), or added "
                   "up");
    is_used_up_[index] = true;
  }

  const Graph& graph_;
  const std::string& step_name_;
  const RequiresGrad requires_grad_;
  const std::vector<int> separated_since_;
  std::vector<bool> is_used_up_;  // whether an earlier call goes over each operator
  // State of the current call, as GradientFlow finds them for all of them.
  int call_ = 0;
  std::vector<bool> reached_;          // whether each value is reached
  std::vector<int> earliest_reached_;  // earliest call that reached each family
};

/// The name of the custom function that a node of the autograd graph calls; empty for other nodes.
std::string custom_function_of(const torch::autograd::Node& node) {
  constexpr std::string_view kWrapper = "torch::autograd::CppNode<";
  const std::string name = node.name();
  if (name.compare(0, kWrapper.size(), kWrapper) != 0) return "";
  return name.substr(kWrapper.size(), name.size() - kWrapper.size() - 1);
}

}  // namespace

void check_histories(const Graph& graph, const std::string& step_name) {
  const int last = graph.roots.empty() ? 0 : graph.roots.back().mode.after_backward;
  if (last == 0) return;
  Histories histories(graph, step_name);
  for (int call = 0; call <= last; ++call) histories.check(call);
}

RunHistories::RunHistories(const Location& location)
    : location_(location), of_placeholders_(placeholder_history()) {
  of_placeholders_.tensor_pre_hooks().clear();  // an earlier run may have ended with an error
}

/// Only a leaf writes parameters, which keep their history.
void RunHistories::follow(const at::Tensor& tensor, const TensorMeta& meta) {
  const auto* entry = location_.table().find(tensor);
  if (entry != nullptr && entry->kind == ValueKind::kParameter) return;
  if (meta.requires_grad && !tensor.requires_grad()) {
    begun_ = true;
    note(tensor);
  }
  follow_in_place(tensor, meta);
}

void RunHistories::spread_to(const at::Tensor& tensor) {
  note(tensor);
  give_placeholder_history(tensor);
}

void RunHistories::note(const at::Tensor& tensor) {
  if (location_.table().find(tensor) != nullptr) registered_.push_back(tensor);
}

/// A leaf works on the buffers of its module themselves.
void RunHistories::hide_while(c10::function_ref<void()> body) const {
  std::vector<torch::autograd::Edge> edges;
  for (const at::Tensor& tensor : registered_) {
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
    torch::autograd::impl::set_gradient_edge(tensor, torch::autograd::Edge());
  }
  const auto shown = c10::make_scope_exit([&] {
    for (size_t i = edges.size(); i-- > 0;) {  // one may be there twice
      torch::autograd::impl::set_gradient_edge(registered_[i], edges[i]);
    }
  });
  body();
}

void RunHistories::keep_end(const at::Tensor& leaf) {
  ends_.push_back(torch::autograd::impl::grad_accumulator(leaf));
}

/// Hooks on gradients of tensors leave no operator behind; those that the function registered are
/// in the history that all of its tensors share.
void RunHistories::check_hooks() const {
  if (of_placeholders_.tensor_pre_hooks().empty()) return;
  of_placeholders_.tensor_pre_hooks().clear();
  location_.refuse(
      "registers a hook on a tensor (register_hook), which is no operator and would not run",
      "Gradients of parameters are complete when the step has returned: read or change them "
      "there, or make the module that needs the hook a leaf: smp::leaf(module)(x)");
}

void RunHistories::note_custom_function() { custom_functions_ |= at::GradMode::is_enabled(); }

/// A custom autograd function is not an operator: its forward's operators are seen, with gradients
/// off, its backward is not.
void RunHistories::check_not_custom(const at::Tensor& tensor) const {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr || meta->grad_fn_ == nullptr) return;
  const std::string function = custom_function_of(*meta->grad_fn_);
  if (function.empty()) return;
  location_.refuse(
      "uses the result of the custom autograd function " + function +
          ", whose backward cannot be captured",
      "Write the function with differentiable tensor operators, or make the module that applies "
      "it a leaf: smp::leaf(module)(x)");
}

/// The result of a custom function that works in place may be seen through another view only.
void RunHistories::watch_custom_functions(const TracedCall& call) {
  for (const at::Tensor& tensor : watched_) check_not_custom(tensor);
  for (const at::Tensor& tensor : call.tensors) {
    if (tensor.defined() && !at::GradMode::is_enabled()) watched_.push_back(tensor);
  }
}

void RunHistories::check_end() const {
  check_hooks();
  for (const at::Tensor& tensor : watched_) check_not_custom(tensor);
}

void RunHistories::end() {
  for (const at::Tensor& tensor : std::exchange(registered_, {})) {
    torch::autograd::impl::set_gradient_edge(tensor, torch::autograd::Edge());
  }
  watched_.clear();
  ends_.clear();
}

}  // namespace smp::graph
