// SPDX-License-Identifier: Apache-2.0
#include "graph/histories.h"

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "graph/late_writes.h"
#include "graph/requires_grad.h"
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

}  // namespace

void check_histories(const Graph& graph, const std::string& step_name) {
  const int last = graph.roots.empty() ? 0 : graph.roots.back().mode.after_backward;
  if (last == 0) return;
  Histories histories(graph, step_name);
  for (int call = 0; call <= last; ++call) histories.check(call);
}

}  // namespace smp::graph
