// SPDX-License-Identifier: Apache-2.0
#include "graph/profile.h"

#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <unordered_set>

#include "core/check.h"
#include "core/node.h"
#include "graph/alias_analysis.h"
#include "graph/allocations.h"
#include "graph/autograd_entry.h"
#include "graph/content.h"
#include "graph/differentiate.h"
#include "graph/operator_clock.h"
#include "graph/requires_grad.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

std::vector<ValueId> tensor_arguments(const Operator& op) {
  std::vector<ValueId> ids;
  for_each_argument(op, [&](ValueId id) { ids.push_back(id); });
  return ids;
}

uint64_t checksum(const Operator& op, const Environment& environment) {
  uint64_t hash = 1;
  for (ValueId id : op.results) {
    if (id == kUndefined) continue;
    hash = hash_content(environment[id], hash);
  }
  return hash;
}

/// Copies of the tensors that the graph writes and does not make, so that another run finds them as
/// the first one did.
Environment copy_written(const Graph& graph, const Environment& environment) {
  const AliasAnalysis aliases(graph);
  Environment copy = environment;
  for (size_t id = 0; id < copy.size(); ++id) {
    if (!copy[id].defined() || !aliases.of(static_cast<ValueId>(id)).is_written()) continue;
    copy[id] = copy_to(copy[id].device(), copy[id].detach());
  }
  return copy;
}

/// Whether the backward pass goes through each operator. Found by storage, since a written view may
/// lead there by way of another. Others need not be able to go back: a value may be written that a
/// history has saved and no backward asks for.
std::vector<bool> operators_with_backward(const Graph& graph) {
  std::vector<bool> leads_to_root(graph.alias_sets), result(graph.operators.size());
  const auto note = [&](ValueId id) { leads_to_root[graph.values[id].alias_set] = true; };
  for (const BackwardRoot& root : graph.roots) note(root.value);
  for (size_t i = graph.operators.size(); i-- > 0;) {
    const Operator& op = graph.operators[i];
    for (int set : op.writes) result[i] = result[i] || leads_to_root[set];
    for_each_result(op, [&](ValueId id) {
      result[i] = result[i] || leads_to_root[graph.values[id].alias_set];
    });
    if (result[i]) for_each_argument(op, note);
  }
  return result;
}

/// One operator's history, and which storages it keeps alive. An argument is kept if something
/// besides the environment and the results refers to it or its storage.
class SavedStorages {
 public:
  SavedStorages(const Operator& op, const Environment& environment)
      : arguments_(tensor_arguments(op)) {
    for (ValueId id : arguments_) before_.push_back(references(environment[id]));
  }

  /// Must be called when results have left their history, which must still be there.
  void find(const Graph& graph, const Operator& op, const Environment& environment,
            std::unordered_set<int>& saved) const {
    for (size_t a = 0; a < arguments_.size(); ++a) {
      const int set = graph.values[arguments_[a]].alias_set;
      References expected = before_[a];
      for (ValueId id : op.results) {
        if (id != kUndefined && graph.values[id].alias_set == set) ++expected.storage;
      }
      const References now = references(environment[arguments_[a]]);
      if (now.tensor > expected.tensor || now.storage > expected.storage) saved.insert(set);
    }
    for (ValueId id : op.results) {
      if (id == kUndefined || lies_on_argument(graph, op, id)) continue;
      if (references(environment[id]).storage > results_in(graph, op, id)) {
        saved.insert(graph.values[id].alias_set);
      }
    }
  }

 private:
  struct References {
    size_t tensor = 0;
    size_t storage = 0;
  };

  static References references(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return {};
    return {tensor.use_count(), tensor.storage().use_count()};
  }

  static size_t results_in(const Graph& graph, const Operator& op, ValueId result) {
    return static_cast<size_t>(std::count_if(op.results.begin(), op.results.end(), [&](ValueId id) {
      return id != kUndefined && graph.values[id].alias_set == graph.values[result].alias_set;
    }));
  }

  std::vector<ValueId> arguments_;
  std::vector<References> before_;
};

/// Runs a graph operator by operator, each with a history of its own.
class Profiler {
 public:
  Profiler(const Graph& graph, const RandomKey& key, bool memory)
      : graph_(graph),
        key_(key),
        memory_(memory),
        clock_(graph.device()),
        segment_(graph, all(graph.operators.size()), all(graph.values.size())),
        has_backward_(operators_with_backward(graph)),
        is_differentiated_(graph.operators.size()),
        last_use_(graph.values.size(), 0),
        times_(graph.operators.size()),
        allocations_(memory ? std::make_unique<Allocations>() : nullptr),
        hidden_bytes_(graph.operators.size()) {
    for (size_t i = 0; i < graph.operators.size(); ++i) {
      for (ValueId id : tensor_arguments(graph.operators[i])) last_use_[id] = i;
    }
    for (const DifferentiatedRange& range : differentiated_ranges(graph)) {
      std::fill(is_differentiated_.begin() + range.first,
                is_differentiated_.begin() + range.last + 1, true);
    }
  }

  /// Calls `check(i, environment)` after the forward of operator i.
  template <class Check>
  void run(Environment environment, const Check& check) {
    if (memory_) segment_.casts().begin_step();  // no history keeps them alone
    for (size_t i = 0; i < graph_.operators.size(); ++i) {
      run_operator(i, environment, check);
      for (ValueId id : tensor_arguments(graph_.operators[i])) {
        if (last_use_[id] == i) environment[id] = at::Tensor();
      }
    }
    segment_.casts().end_step();
  }

  /// The least times of all runs; bytes are counted at the operator that makes a storage.
  void set_costs(Graph& graph) const {
    for (size_t i = 0; i < graph.operators.size(); ++i) {
      Operator& op = graph.operators[i];
      op.cost = Cost();
      op.cost.forward_us = round_to_two_digits(times_[i].forward_us);
      op.cost.backward_us = round_to_two_digits(times_[i].backward_us);
      std::unordered_set<int> aliased;
      for (ValueId id : tensor_arguments(op)) aliased.insert(graph.values[id].alias_set);
      for (ValueId id : op.results) {
        if (id == kUndefined || aliased.count(graph.values[id].alias_set) > 0) continue;
        const Value& value = graph.values[id];
        op.cost.output_bytes += value.meta.nbytes();
        if (saved_.count(value.alias_set) > 0) op.cost.saved_bytes += value.meta.nbytes();
      }
      if (memory_ && graph.trains()) op.cost.saved_bytes += std::max<int64_t>(hidden_bytes_[i], 0);
    }
  }

 private:
  struct Times {
    double forward_us = std::numeric_limits<double>::infinity();
    double backward_us = std::numeric_limits<double>::infinity();
  };

  /// Bytes of the results that do not lie on arguments.
  int64_t bytes_of_results(const Operator& op, const Environment& environment) const {
    std::unordered_set<const void*> counted;
    for (ValueId id : tensor_arguments(op)) {
      if (environment[id].defined() && environment[id].has_storage())
        counted.insert(environment[id].storage().data());
    }
    int64_t bytes = 0;
    for (ValueId id : op.results) {
      if (id == kUndefined || !environment[id].defined()) continue;
      if (!environment[id].has_storage()) continue;
      const auto& storage = environment[id].storage();
      if (counted.insert(storage.data()).second) bytes += static_cast<int64_t>(storage.nbytes());
    }
    return bytes;
  }

  static std::vector<int> all(size_t count) {
    std::vector<int> result(count);
    std::iota(result.begin(), result.end(), 0);
    return result;
  }

  template <class Check>
  void run_operator(size_t i, Environment& environment, const Check& check) {
    const Operator& op = graph_.operators[i];
    enter_arguments(i, environment);
    const SavedStorages before(op, environment);
    const int64_t allocated = allocated_now() - segment_.casts().bytes();
    clock_.start();
    segment_.run_one(i, environment, key_);
    times_[i].forward_us = std::min(times_[i].forward_us, clock_.stop());
    hidden_bytes_[i] =
        allocated_now() - segment_.casts().bytes() - allocated - bytes_of_results(op, environment);
    check(i, environment);
    if (is_differentiated_[i]) return go_on_with(i);
    std::vector<torch::autograd::Edge> starts;
    std::vector<at::Tensor> gradients;
    for (ValueId id : op.results) {
      if (id == kUndefined) continue;
      if (has_backward_[i] && environment[id].requires_grad()) {
        starts.push_back(start_of_backward(environment[id]));
        gradients.push_back(at::ones_like(environment[id]));
      }
      environment[id] = enter(environment[id], nullptr);
    }
    before.find(graph_, op, environment, saved_);
    times_[i].backward_us = std::min(times_[i].backward_us, time_of_backward(starts, gradients));
  }

  double time_of_backward(const std::vector<torch::autograd::Edge>& starts,
                          const std::vector<at::Tensor>& gradients) {
    if (starts.empty()) return 0;
    clock_.start();
    run_backward(starts, gradients);
    return clock_.stop();
  }

  /// A history of one operator: its arguments enter anew, but for values that the operators of a
  /// differentiated range have made or read before.
  void enter_arguments(size_t i, Environment& environment) {
    if (!is_differentiated_[i]) {
      sinks_.clear();
      in_range_.clear();
    }
    const bool records = records_history(graph_, graph_.operators[i]);
    for (ValueId id : tensor_arguments(graph_.operators[i])) {
      if (is_differentiated_[i] && !in_range_.insert(id).second) continue;
      // Under no_grad it may be written, after which libtorch refuses to show its history.
      if (records && environment[id].defined() && is_unlinked(graph_, id)) {
        environment[id] = enter_unlinked(environment[id]);
        continue;
      }
      const bool differentiable = environment[id].defined() && graph_.values[id].meta.requires_grad;
      sinks_.push_back(differentiable ? core::make_node<GradientSink>() : nullptr);
      environment[id] = enter(environment[id], sinks_.back());
    }
  }

  /// An operator whose history has to stay for `autograd::grad`. Its backward is not measured, but
  /// taken for two of its forward; whatever it may save counts as saved.
  void go_on_with(size_t i) {
    const Operator& op = graph_.operators[i];
    for_each_result(op, [&](ValueId id) { in_range_.insert(id); });
    const bool trains = graph_.trains() && records_history(graph_, op);
    times_[i].backward_us = trains ? 2 * times_[i].forward_us : 0;
    const auto keep = [&](ValueId id) {
      if (graph_.values[id].meta.requires_grad) saved_.insert(graph_.values[id].alias_set);
    };
    for_each_argument(op, keep);
    for_each_result(op, keep);
  }

  int64_t allocated_now() const { return allocations_ ? allocations_->now() : 0; }

  const Graph& graph_;
  const RandomKey& key_;
  const bool memory_;
  OperatorClock clock_;
  Segment segment_;
  const std::vector<bool> has_backward_;  // whether each operator has one
  std::vector<bool> is_differentiated_;   // in a range that `autograd::grad` ends
  std::unordered_set<ValueId> in_range_;
  std::vector<GradientSinkPtr> sinks_;  // sinks of values that have entered
  std::vector<size_t> last_use_;
  std::vector<Times> times_;
  const std::unique_ptr<Allocations> allocations_;  // libtorch counts, and warns, while it exists
  std::vector<int64_t> hidden_bytes_;  ///< kept by each operator's history, in no value
  std::unordered_set<int> saved_;      ///< alias sets of which something is kept for backward
};

}  // namespace

double round_to_two_digits(double value) {
  if (value <= 0) return 0;
  const double unit = std::pow(10.0, std::floor(std::log10(value)) - 1);
  return std::round(value / unit) * unit;
}

void measure_costs(Graph& graph, Environment environment, const RandomKey& key,
                   const std::vector<uint64_t>& checksums, const std::string& step_name,
                   const MeasureOptions& options) {
  Profiler profiler(graph, key, options.memory());
  const auto compare = [&](size_t i, const Environment& results) {
    const Operator& op = graph.operators[i];
    if (checksums.empty() || checksums[i] == 0 || graph.makes_literal(op)) return;
    SMP_CHECK_WITH(CaptureError, checksum(op, results) == checksums[i], "step function \"",
                   step_name, "\": operator ", i, " (", op.name(), ", in module \"", op.scope,
                   "\") gives another result when it is replayed than it gave in the step "
                   "function. Something that is no tensor operator changed its input (an "
                   "accessor, data_ptr, a library that works in place), or the operator is not "
                   "deterministic. Use tensor operators there");
  };
  const Environment again = options.runs() > 1 ? copy_written(graph, environment) : Environment();
  OperatorClock host(at::kCPU);
  host.start();
  profiler.run(std::move(environment), compare);
  const double run_us = host.stop();
  host.start();
  for (int run = 1; run < options.runs(); ++run) {
    if (host.stop() + run_us > 1e6 * options.seconds()) break;
    profiler.run(copy_written(graph, again), [](size_t, const Environment&) {});
  }
  profiler.set_costs(graph);
}

std::string costs_to_bytes(const Graph& graph) {
  std::vector<Cost> costs;
  for (const Operator& op : graph.operators) costs.push_back(op.cost);
  return std::string(reinterpret_cast<const char*>(costs.data()), costs.size() * sizeof(Cost));
}

void costs_from_bytes(Graph& graph, const std::string& bytes) {
  SMP_INTERNAL_ASSERT(bytes.size() == graph.operators.size() * sizeof(Cost), "costs of ",
                      bytes.size() / sizeof(Cost), " operators for a graph of ",
                      graph.operators.size());
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    std::memcpy(&graph.operators[i].cost, bytes.data() + i * sizeof(Cost), sizeof(Cost));
  }
}

}  // namespace smp::graph
