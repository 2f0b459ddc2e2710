// SPDX-License-Identifier: Apache-2.0
#include "pipeline/kept_for_weights.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "graph/alias_analysis.h"
#include "graph/autocast.h"
#include "graph/split_backward.h"
#include "graph/visit.h"
#include "partitioner/gradient_flow.h"

namespace smp::pipeline {
namespace {

using graph::Graph;
using graph::Operator;
using graph::Value;
using graph::ValueId;

template <class Values>
bool is_in(const Values& values, ValueId id) {
  return std::find(values.begin(), values.end(), id) != values.end();
}

/// Whether the second term of a sum is multiplied.
bool has_factor(const Operator& op) {
  const c10::IValue& alpha = op.arguments.back().constant;
  return !alpha.isScalar() || !alpha.toScalar().equal(1);
}

/// Whether the operator sends the gradient of its result back to an argument as it is, or as a
/// view.
bool passes_gradient(const Graph& graph, const Operator& op, ValueId argument) {
  static const std::set<std::string> sums = {"aten::add", "aten::add_"};
  static const std::set<std::string> others = {
      "aten::_unsafe_view", "aten::clone", "aten::contiguous", "aten::flatten",
      "aten::reshape",      "aten::sub",   "aten::sub_"};
  if (op.results.size() != 1 || op.results[0] == graph::kUndefined) return false;
  const Value& from = graph.values[op.results[0]];
  const Value& to = graph.values[argument];
  if (from.meta.numel() != to.meta.numel() || from.meta.dtype != to.meta.dtype) return false;
  const std::string& name = op.handle.schema().name();
  const bool is_view = op.writes.empty() && from.alias_set == to.alias_set;
  const bool is_first = is_in(op.arguments[0].values, argument);
  if (sums.count(name) > 0) return is_first || !has_factor(op);
  return is_first && (is_view || others.count(name) > 0);
}

/// Whether autocast has a say in the type of the operator's arguments.
bool is_autocast(const Operator& op, const Value& argument) {
  const auto key =
      at::autocast::get_autocast_dispatch_key_from_device_type(argument.meta.device.type());
  const bool is_on =
      argument.meta.device.is_cpu() ? op.mode.autocast_cpu : op.mode.autocast_accelerator;
  return is_on && op.handle.hasKernelForDispatchKey(key);
}

/// Whether libtorch computes each layer of an LSTM by one function, oneDNN's. A CPU without
/// instructions for bfloat16 does not in that type, and keeps more: the ranks are not asked for
/// theirs, since all have to come to one schedule.
bool is_one_function(const Graph& graph, const Operator& op) {
  const c10::FunctionSchema& schema = op.handle.schema();
  if (schema.name() != "aten::lstm" || schema.overload_name() != "input") return false;
  const auto& states = op.arguments[1].values;
  const auto size_of = [&](ValueId id) { return graph.values[id].meta.sizes.back(); };
  const bool projects = size_of(states[0]) != size_of(states[1]);
  const at::ScalarType type = graph.values[op.arguments[0].values[0]].meta.dtype;
  return !projects && (type == at::kFloat || type == at::kBFloat16) &&
         at::globalContext().userEnabledMkldnn() && at::hasMKLDNN();
}

/// Whether the operator is made of functions that `SplitBackward` divides: products of each weight
/// with all rows of the input, or with states, of which there are as many.
bool is_recurrent(const Graph& graph, const Operator& op) {
  static const std::set<std::string> names = {
      "aten::gru",      "aten::gru_cell", "aten::lstm",          "aten::lstm_cell",
      "aten::rnn_relu", "aten::rnn_tanh", "aten::rnn_relu_cell", "aten::rnn_tanh_cell"};
  return names.count(op.handle.schema().name()) > 0 && !is_one_function(graph, op) &&
         graph.values[op.arguments[0].values[0]].meta.device.is_cpu();
}

/// The facts of a graph that do not depend on its stages.
class GradientFacts {
 public:
  explicit GradientFacts(const Graph& graph)
      : aliases(graph), casts(graph::weights_to_cast(graph)), flow_(graph) {
    find_gradients(graph);
  }

  /// Whether the operator sends a gradient back to its argument.
  bool sends_gradient(int index, ValueId argument) const {
    const std::vector<int>& uses = flow_.gradient_uses(argument);
    return std::binary_search(uses.begin(), uses.end(), index, std::greater<>());
  }
  /// A value, the same for all whose gradients lie in the same memory.
  ValueId gradient_of(ValueId value) const { return gradient_of_[value]; }

  const graph::AliasAnalysis aliases;
  const std::vector<std::vector<ValueId>> casts;  // per operator, those that microbatches share

 private:
  /// The gradient of a value that several operators use is a sum, with memory of its own.
  void find_gradients(const Graph& graph) {
    gradient_of_.resize(graph.values.size());
    std::iota(gradient_of_.begin(), gradient_of_.end(), 0);
    for (size_t i = graph.operators.size(); i-- > 0;) {
      const Operator& op = graph.operators[i];
      graph::for_each_argument(op, [&](ValueId id) {
        const std::vector<int>& uses = flow_.gradient_uses(id);
        if (uses.size() != 1 || uses[0] != static_cast<int>(i)) return;
        if (passes_gradient(graph, op, id)) gradient_of_[id] = gradient_of_[op.results[0]];
      });
    }
  }

  const partitioner::GradientFlow flow_;
  std::vector<ValueId> gradient_of_;
};

/// The half of a backward that is left for the weights, on one stage.
class WeightHalf {
 public:
  WeightHalf(const Graph& graph, const partitioner::Plan& plan, const std::vector<Edge>& edges,
             const GradientFacts& facts, int stage)
      : graph_(graph), plan_(plan), facts_(facts), stage_(stage) {
    for (const Edge& edge : edges) {
      if (edge.to != stage) continue;
      const std::vector<ValueId> returning = edge.returning();
      leads_to_input_.insert(returning.begin(), returning.end());
    }
    for (size_t i = 0; i < graph.operators.size(); ++i) {
      if (plan.stage_of_operator[i] == stage) add(static_cast<int>(i));
    }
    for (const Edge& edge : edges) {
      if (edge.from != stage) continue;
      for (const ValueId id : edge.gradients) {
        if (leads_to_input_.count(id) == 0) keep_gradient(id);
      }
    }
  }

  KeptForWeights kept() const {
    KeptForWeights kept;
    for (const auto& [set, bytes] : storages_) kept.saved += static_cast<double>(bytes);
    kept.saved += static_cast<double>(hidden_);
    kept.gradients = static_cast<double>(hidden_gradients_);
    for (const ValueId id : gradients_) {
      kept.gradients += static_cast<double>(graph_.values[id].meta.nbytes());
    }
    return kept;
  }

 private:
  void add(int index) {
    const Operator& op = graph_.operators[index];
    std::vector<ValueId> weights;
    bool has_input = false;
    graph::for_each_argument(op, [&](ValueId id) {
      if (!facts_.sends_gradient(index, id)) return;
      const bool is_input = leads_to_input_.count(id) > 0;
      has_input |= is_input;
      if (!is_input) weights.push_back(id);
    });
    if (has_input) leads_to_input_.insert(op.results.begin(), op.results.end());
    if (weights.empty()) return;
    const auto* saved = graph::saved_arguments_if_divisible(op);
    if (has_input && is_recurrent(graph_, op)) return keep_products(op, weights);
    if (saved == nullptr && has_input) {  // computed in the first half
      for (const ValueId id : weights) keep_gradient(id);
      return;
    }
    if (has_input) {
      graph::for_each_result(op, [&](ValueId id) {
        if (graph_.values[id].meta.requires_grad) keep_gradient(id);
      });
    }
    saved == nullptr ? keep_all(op) : keep_arguments(index, *saved);
  }

  void keep_gradient(ValueId id) { gradients_.insert(facts_.gradient_of(id)); }

  void keep_arguments(int index, const std::vector<size_t>& positions) {
    const Operator& op = graph_.operators[index];
    for (const size_t position : positions) {
      for (const ValueId id : op.arguments[position].values) {
        if (id != graph::kUndefined) keep_argument(index, id);
      }
    }
  }

  /// Keeps of each product the factor of the weight, and the gradient of the result. The factors of
  /// a cell are its arguments, and where it adds up both products, they have one gradient.
  void keep_products(const Operator& op, const std::vector<ValueId>& weights) {
    const std::string& name = op.handle.schema().name();
    const bool is_cell = name.find("_cell") != std::string::npos;
    const bool adds_up = is_cell && name != "aten::gru_cell";
    const graph::TensorMeta& input = graph_.values[op.arguments[0].values[0]].meta;
    const int64_t rows = input.numel() / input.sizes.back();
    int64_t gradients = 0;
    for (const ValueId id : weights) {
      const graph::TensorMeta& weight = graph_.values[id].meta;
      if (weight.sizes.size() != 2) continue;
      const auto bytes = rows * static_cast<int64_t>(c10::elementSize(weight.dtype));
      if (!is_cell) hidden_ += bytes * weight.sizes[1];
      const int64_t gradient = bytes * weight.sizes[0];
      gradients = adds_up ? std::max(gradients, gradient) : gradients + gradient;
    }
    hidden_gradients_ += gradients;
    for (const size_t position : {0, 1}) {
      if (is_cell) keep_storage(op.arguments[position].values[0]);
    }
  }

  /// If autocast casts the argument, the copy is saved.
  void keep_argument(int index, ValueId id) {
    const Operator& op = graph_.operators[index];
    const graph::TensorMeta& argument = graph_.values[id].meta;
    const at::ScalarType type = graph_.values[op.results[0]].meta.dtype;
    const bool is_cast = argument.dtype != type && at::isFloatingType(argument.dtype) &&
                         is_autocast(op, graph_.values[id]);
    if (!is_cast) return keep_storage(id);
    if (is_in(facts_.casts[index], id)) return;  // shared by all microbatches
    hidden_ += argument.numel() * static_cast<int64_t>(c10::elementSize(type));
  }

  /// For an operator that only weights are behind. Views save nothing.
  void keep_all(const Operator& op) {
    if (op.writes.empty() && graph::acts_on_arguments(graph_, op)) return;
    graph::for_each_argument(op, [&](ValueId id) { keep_storage(id); });
    graph::for_each_result(op, [&](ValueId id) { keep_storage(id); });
  }

  void keep_storage(ValueId id) {
    const graph::AliasAnalysis::Set& memory = facts_.aliases.of(id);
    if (memory.values.empty() || memory.outlives_run()) return;
    // One that was received has the size of the value, one that was made here that of the first.
    const Value& first = graph_.values[memory.values.front()];
    const bool is_made_here = plan_.stage_of_operator[first.producer] == stage_;
    const int64_t bytes = is_made_here ? std::min(first.meta.nbytes(),
                                                  graph_.operators[first.producer].cost.saved_bytes)
                                       : graph_.values[id].meta.nbytes();
    storages_.emplace(graph_.values[id].alias_set, bytes);
  }

  const Graph& graph_;
  const partitioner::Plan& plan_;
  const GradientFacts& facts_;
  const int stage_;
  std::set<ValueId> leads_to_input_;  // values from which a gradient goes to another stage
  std::set<ValueId> gradients_;       // one for each memory
  std::map<int, int64_t> storages_;   // alias sets
  int64_t hidden_ = 0;                // bytes of tensors that are no values: casts, states
  int64_t hidden_gradients_ = 0;      // the same
};

}  // namespace

std::vector<KeptForWeights> kept_for_weights(const Graph& graph, const partitioner::Plan& plan,
                                             const std::vector<Edge>& edges) {
  const GradientFacts facts(graph);
  std::vector<KeptForWeights> kept;
  for (int stage = 0; stage < plan.stages(); ++stage) {
    kept.push_back(WeightHalf(graph, plan, edges, facts, stage).kept());
  }
  return kept;
}

}  // namespace smp::pipeline
