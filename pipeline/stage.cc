#include "pipeline/stage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <set>
#include <utility>

#include "graph/leaf.h"
#include "graph/operator_traits.h"
#include "smp/core/error.h"

namespace smp::pipeline {

using graph::kUndefined;
using graph::ValueId;
using graph::ValueKind;

std::vector<Edge> edges_of(const graph::Graph& graph, const partitioner::Plan& plan) {
  std::map<std::pair<int, int>, Edge> edges;
  const auto edge = [&](int from, int to) -> Edge& {
    Edge& found = edges[{from, to}];
    found.from = from;
    found.to = to;
    return found;
  };
  for (const auto& transfer : plan.transfers) {
    Edge& found = edge(transfer.from, transfer.to);
    found.values.push_back(transfer.value);
    if (transfer.needs_gradient) found.gradients.push_back(transfer.value);
  }
  for (const auto& replica : plan.replicas) {
    if (!graph.trains() || !replica.needs_gradient) continue;
    SMP_INTERNAL_ASSERT(replica.gradient_to < replica.stage, "parameter \"",
                        graph.values[replica.value].name, "\" is owned by stage ", replica.owner,
                        " but stage ", replica.stage, " reads it earlier");
    edge(replica.gradient_to, replica.stage).replicas.push_back(replica.value);
  }
  std::vector<Edge> result;
  for (auto& [ends, found] : edges) result.push_back(std::move(found));
  return result;
}

std::vector<StageEdge> stage_edges(const std::vector<Edge>& edges) {
  std::vector<StageEdge> result;
  for (const Edge& edge : edges) {
    result.push_back({edge.from, edge.to, !edge.gradients.empty() || !edge.replicas.empty()});
  }
  return result;
}

Stage::Stage(const graph::Graph& graph, const partitioner::Plan& plan,
             const std::vector<Edge>& edges, int index, const graph::TensorTable& table)
    : graph_(graph), edges_(edges), index_(index) {
  for (size_t i = 0; i < plan.stage_of_operator.size(); ++i) {
    if (plan.stage_of_operator[i] == index) operators_.push_back(static_cast<int>(i));
  }
  for (const auto& again : plan.recomputed) {
    if (again.stage == index) operators_.push_back(again.operator_index);
  }
  std::sort(operators_.begin(), operators_.end());
  for (size_t i = 0; i < graph.roots.size(); ++i) {
    if (plan.stage_of_root[i] == index) roots_.push_back(graph.roots[i]);
  }
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    if (plan.stage_of_output[i] != index) continue;
    const auto position = static_cast<int>(i);
    returned_.push_back(position);
    const ValueId output = graph.outputs[i];
    if (output != kUndefined && on_shared_memory(output)) copied_.insert(position);
  }
  find_kept();
  segment_ = std::make_unique<graph::Segment>(graph, operators_, kept_);
  find_reads(plan, table);
}

void Stage::find_kept() {
  std::set<ValueId> kept;
  for (const Edge& edge : edges_) {
    if (edge.from == index_) kept.insert(edge.values.begin(), edge.values.end());
  }
  for (int position : returned_) kept.insert(graph_.outputs[position]);
  for (const auto& root : roots_) {
    kept.insert(root.value);
    kept.insert(root.gradient);
  }
  kept.erase(kUndefined);
  kept_.assign(kept.begin(), kept.end());
}

/// Whether a value lies on the memory of a parameter, a buffer, an input or a constant, which
/// outlives the microbatch.
bool Stage::on_shared_memory(ValueId value) const {
  const int alias_set = graph_.values[value].alias_set;
  return std::any_of(graph_.values.begin(), graph_.values.end(), [&](const graph::Value& other) {
    return other.alias_set == alias_set && other.kind != ValueKind::kResult;
  });
}

bool Stage::writes(ValueId value) const {
  const int alias_set = graph_.values[value].alias_set;
  for (int index : operators_) {
    const auto& written = graph_.operators[index].writes;
    if (std::find(written.begin(), written.end(), alias_set) != written.end()) return true;
  }
  return false;
}

/// Whether an operator reads values `of_interest` where its backward may need them. One that
/// updates running statistics (arguments 3 and 4) needs those of the batch instead.
template <class Predicate>
bool reads_for_backward(const graph::Operator& op, const Predicate& of_interest) {
  const bool updates =
      graph::writes_running_statistics(op.handle.schema().name()) && !op.writes.empty();
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (updates && (i == 3 || i == 4)) continue;
    const auto& values = op.arguments[i].values;
    if (std::any_of(values.begin(), values.end(), of_interest)) return true;
  }
  return false;
}

/// Whether an operator with a backward reads a value's storage, or a backward starts with it as the
/// gradient. A leaf works on the module's own buffers.
bool Stage::backward_may_need(ValueId value) const {
  const int alias_set = graph_.values[value].alias_set;
  const auto on_it = [&](ValueId id) {
    return id != kUndefined && graph_.values[id].alias_set == alias_set;
  };
  const auto differentiable = [&](ValueId id) {
    return id != kUndefined && graph_.values[id].meta.requires_grad;
  };
  bool needed = std::any_of(roots_.begin(), roots_.end(),
                            [&](const auto& root) { return on_it(root.gradient); });
  for (int index : operators_) {
    const graph::Operator& op = graph_.operators[index];
    if (!reads_for_backward(op, on_it)) continue;
    if (graph::is_leaf(op.handle)) return false;
    needed |= std::any_of(op.results.begin(), op.results.end(), differentiable);
  }
  return needed;
}

void Stage::find_reads(const partitioner::Plan& plan, const graph::TensorTable& table) {
  std::set<ValueId> read(segment_->reads().begin(), segment_->reads().end());
  read.insert(kept_.begin(), kept_.end());
  for (ValueId id : read) {
    const graph::Value& value = graph_.values[id];
    switch (value.kind) {
      case ValueKind::kInput:
        inputs_.push_back({id, std::stoul(value.name), writes(id)});
        break;
      case ValueKind::kParameter:
      case ValueKind::kBuffer:
        parameters_.push_back({id, table.at(value.name).tensor, plan.owner.at(value.name) == index_,
                               graph_.trains() && value.meta.requires_grad,
                               graph_.trains() && writes(id) && backward_may_need(id)});
        break;
      case ValueKind::kConstant:
      case ValueKind::kLiteral:
        contents_.push_back({id, value.content, writes(id)});
        break;
      case ValueKind::kResult:
        break;  // made here or received
    }
  }
}

void Stage::apply(const std::vector<graph::ConstantOverride>& constants,
                  const std::vector<graph::ContentOverride>& contents) {
  segment_->apply(constants);
  for (const auto& change : contents) {
    for (Content& content : contents_) {
      if (content.value == change.value) content.tensor = change.content;
    }
  }
}

void Stage::enter_all(InFlight& state, graph::Environment& environment,
                      const std::vector<at::Tensor>& inputs,
                      const std::map<int, std::vector<at::Tensor>>& received) const {
  // Whatever requires a gradient in the program does so here, even if none comes back: operators
  // choose their kernels by it (matmul folds its operands), so the bits depend on it.
  const auto enter = [&](ValueId id, const at::Tensor& data, bool differentiated) {
    std::shared_ptr<graph::GradientSink> sink;
    if (differentiated || graph_.values[id].meta.requires_grad) {
      sink = std::make_shared<graph::GradientSink>();
    }
    if (differentiated) state.sinks[id] = sink;
    environment[id] = graph::enter(data, sink);
  };
  for (const Input& input : inputs_) {
    const at::Tensor& tensor = inputs[input.position];
    environment[input.value] = input.written ? tensor.clone() : tensor;
  }
  for (const Content& content : contents_) {
    environment[content.value] = content.written ? content.tensor.clone() : content.tensor;
  }
  for (const Parameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    enter(parameter.value, parameter.copied ? tensor.detach().clone() : tensor,
          parameter.differentiated);
  }
  for (const auto& [index, tensors] : received) {
    const Edge& edge = edges_[index];
    for (size_t i = 0; i < edge.values.size(); ++i) {
      const bool differentiated = std::find(edge.gradients.begin(), edge.gradients.end(),
                                            edge.values[i]) != edge.gradients.end();
      enter(edge.values[i], tensors[i], differentiated);
    }
  }
}

void Stage::forward(int microbatch, const std::vector<at::Tensor>& inputs,
                    const std::map<int, std::vector<at::Tensor>>& received,
                    const graph::RandomKey& key) {
  // Operators set the modes they were recorded in.
  at::AutoGradMode grad(true);
  graph::Environment environment(graph_.values.size());
  InFlight state;
  enter_all(state, environment, inputs, received);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const Parameter& parameter : parameters_) {
    if (!parameter.copied) continue;
    copies.emplace_back(parameter.tensor.detach(), environment[parameter.value].variable_data());
  }
  segment_->run(environment, key);
  for (const auto& [buffer, copy] : copies) buffer.copy_(copy);
  keep_results(microbatch, state, environment);
  if (graph_.trains()) in_flight_[microbatch] = std::move(state);
}

void Stage::keep_results(int microbatch, InFlight& state, const graph::Environment& environment) {
  for (size_t index = 0; index < edges_.size(); ++index) {
    const Edge& edge = edges_[index];
    if (edge.from != index_) continue;
    auto& values = values_[microbatch][static_cast<int>(index)];
    for (ValueId id : edge.values) values.push_back(environment[id].detach());
    for (ValueId id : edge.gradients) {
      state.starts[id] = graph::start_of_backward(environment[id]);
    }
    for (ValueId id : edge.replicas) {
      const auto sink = state.sinks.find(id);
      if (sink != state.sinks.end()) state.starts[id] = {sink->second, 0};
    }
  }
  for (const auto& root : roots_) {
    const at::Tensor& value = environment[root.value];
    state.starts[root.value] = graph::start_of_backward(value);
    state.root_gradients.push_back(root.gradient == kUndefined
                                       ? at::ones_like(value.detach())
                                       : environment[root.gradient].detach());
  }
  for (int position : returned_) {
    const ValueId id = graph_.outputs[position];
    at::Tensor& output = outputs_[microbatch][position];
    if (id == kUndefined) continue;
    // The history of an evaluation ends with its stage.
    output = graph_.trains() ? environment[id] : environment[id].detach();
    // Later microbatches and updates go on writing buffers and parameters.
    if (copied_.count(position) > 0) output = output.clone();
  }
}

std::vector<at::Tensor> Stage::take_values(int microbatch, int edge) {
  auto taken = values_.at(microbatch).extract(edge);
  if (values_.at(microbatch).empty()) values_.erase(microbatch);
  return std::move(taken.mapped());
}

at::Tensor Stage::InFlight::gradient(ValueId value) const {
  const auto sink = sinks.find(value);
  return sink == sinks.end() ? at::Tensor() : sink->second->gradient;
}

Stage::Starts Stage::begin_backward(InFlight& state,
                                    const std::map<int, std::vector<at::Tensor>>& received) const {
  Starts starts;
  const auto start = [&](ValueId id, const at::Tensor& gradient) {
    starts.edges.push_back(state.starts.at(id));
    starts.gradients.push_back(gradient);
  };
  for (size_t i = 0; i < roots_.size(); ++i) start(roots_[i].value, state.root_gradients[i]);
  // Gradients from later stages come first into every sum, as their operators come last in the
  // program and so first in a backward pass.
  for (const auto& [index, tensors] : received) {
    const Edge& edge = edges_[index];
    size_t next = 0;
    for (ValueId id : edge.gradients) start(id, tensors[next++]);
    for (ValueId id : edge.replicas) {
      const at::Tensor& gradient = tensors[next++];
      if (state.starts.count(id) > 0) {
        start(id, gradient);
      } else if (gradient.defined()) {
        state.foreign.emplace_back(id, gradient);  // the owner does not read it itself
      }
    }
  }
  // The history is freed as the backward goes through it.
  state.starts.clear();
  state.root_gradients.clear();
  return starts;
}

void Stage::backward(int microbatch, const std::map<int, std::vector<at::Tensor>>& received,
                     const GradientConsumer& consume) {
  auto node = in_flight_.extract(microbatch);
  InFlight& state = node.mapped();
  {
    const Starts starts = begin_backward(state, received);
    graph::run_backward(starts.edges, starts.gradients);
  }
  consume_gradients(microbatch, state, consume);
  keep_gradients(microbatch, state);
}

void Stage::backward_inputs(int microbatch,
                            const std::map<int, std::vector<at::Tensor>>& received) {
  InFlight& state = in_flight_.at(microbatch);
  const Starts starts = begin_backward(state, received);
  state.split =
      std::make_unique<graph::SplitBackward>(starts.edges, starts.gradients, input_sinks(state));
  keep_gradients(microbatch, state);
}

void Stage::backward_weights(int microbatch, const GradientConsumer& consume) {
  auto node = in_flight_.extract(microbatch);
  InFlight& state = node.mapped();
  state.split->run_weights();
  consume_gradients(microbatch, state, consume);
}

/// The ends of what came from earlier stages, and of parameters that they own.
std::vector<std::shared_ptr<graph::GradientSink>> Stage::input_sinks(const InFlight& state) const {
  std::vector<std::shared_ptr<graph::GradientSink>> sinks;
  const auto add = [&](ValueId id) {
    const auto sink = state.sinks.find(id);
    if (sink != state.sinks.end()) sinks.push_back(sink->second);
  };
  for (const Edge& edge : edges_) {
    if (edge.to != index_) continue;
    std::for_each(edge.gradients.begin(), edge.gradients.end(), add);
    std::for_each(edge.replicas.begin(), edge.replicas.end(), add);
  }
  return sinks;
}

void Stage::consume_gradients(int microbatch, const InFlight& state,
                              const GradientConsumer& consume) const {
  for (const auto& [id, gradient] : state.foreign) consume(id, microbatch, gradient);
  for (const Parameter& parameter : parameters_) {
    const at::Tensor gradient = state.gradient(parameter.value);
    if (parameter.owned && gradient.defined()) consume(parameter.value, microbatch, gradient);
  }
}

void Stage::keep_gradients(int microbatch, const InFlight& state) {
  for (size_t index = 0; index < edges_.size(); ++index) {
    const Edge& edge = edges_[index];
    if (edge.to != index_ || (edge.gradients.empty() && edge.replicas.empty())) continue;
    auto& returning = gradients_[microbatch][static_cast<int>(index)];
    for (ValueId id : edge.gradients) returning.push_back(state.gradient(id));
    for (ValueId id : edge.replicas) returning.push_back(state.gradient(id));
  }
}

std::vector<at::Tensor> Stage::take_gradients(int microbatch, int edge) {
  auto taken = gradients_.at(microbatch).extract(edge);
  if (gradients_.at(microbatch).empty()) gradients_.erase(microbatch);
  return std::move(taken.mapped());
}

std::map<int, at::Tensor> Stage::take_outputs(int microbatch) {
  auto taken = outputs_.extract(microbatch);
  return taken.empty() ? std::map<int, at::Tensor>{} : std::move(taken.mapped());
}

}  // namespace smp::pipeline
