// SPDX-License-Identifier: Apache-2.0
#include "pipeline/stage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/node.h"
#include "graph/late_writes.h"
#include "graph/leaf.h"
#include "graph/mode_scope.h"
#include "graph/operator_traits.h"
#include "graph/requires_grad.h"
#include "graph/visit.h"

namespace smp::pipeline {

using graph::kUndefined;
using Pass = graph::ParameterResidency::Pass;
using graph::ValueId;
using graph::ValueKind;

Stage::Stage(const graph::Graph& graph, const partitioner::Plan& plan,
             const std::vector<Edge>& edges, int index, int microbatches,
             const graph::TensorTable& table)
    : graph_(graph),
      aliases_(graph),
      edges_(edges),
      index_(index),
      has_backward_(backward_of_stage(graph, plan, edges)[index]),
      separated_(graph::sets_to_separate(graph)),
      uses_(graph::uses_of_storages(graph)),
      environment_(graph.values.size()),
      in_flight_(microbatches) {
  for (size_t i = 0; i < plan.stage_of_operator.size(); ++i) {
    if (plan.stage_of_operator[i] == index) operators_.push_back(static_cast<int>(i));
  }
  for (const auto& again : plan.recomputed) {
    if (again.stage == index) operators_.push_back(again.operator_index);
  }
  std::sort(operators_.begin(), operators_.end());
  calls_foreign_ = std::any_of(operators_.begin(), operators_.end(), [&](int operator_index) {
    return is_foreign(graph.operators[operator_index]);
  });
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
  segment_ = std::make_unique<graph::CheckpointedSegment>(graph, operators_, kept_);
  find_reads(plan, table);
  find_edges();
  for (InFlight& state : in_flight_) {
    state.values.resize(own_edges_.size());
    state.gradients.resize(own_edges_.size());
  }
}

void Stage::set_regions(const std::vector<int>& region_of_operator,
                        std::shared_ptr<graph::TensorStore> store) {
  store_ = std::move(store);
  segment_ =
      std::make_unique<graph::CheckpointedSegment>(graph_, operators_, kept_, region_of_operator);
}

void Stage::set_residency(std::shared_ptr<graph::ParameterResidency> residency) {
  residency_ = std::move(residency);
  segment_->set_residency(residency_);
}

void Stage::prefetch(int microbatch) {
  InFlight& state = in_flight_[microbatch];
  if (state.has_run) {
    state.stored.prefetch();
  } else {
    state.needed_soon = true;
  }
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
  std::set<ValueId> buffers;
  for (int index : operators_) {
    graph::for_each_argument(graph_.operators[index], [&](ValueId id) {
      if (graph_.values[id].kind == ValueKind::kBuffer) buffers.insert(id);
    });
  }
  for (ValueId id : buffers) {
    if (is_copied(id)) kept.insert(id);
  }
  kept.erase(kUndefined);
  kept_.assign(kept.begin(), kept.end());
}

/// Whether a value lies on the memory of a parameter, a buffer, an input or a constant, which
/// outlives the microbatch.
bool Stage::on_shared_memory(ValueId value) const { return aliases_.of(value).outlives_run(); }

bool Stage::writes(ValueId value) const {
  const auto& writers = aliases_.of(value).writers;
  return std::any_of(writers.begin(), writers.end(), [this](int index) {
    return std::binary_search(operators_.begin(), operators_.end(), index);
  });
}

/// Whether an operator reads values `of_interest` where its backward may need them. One that
/// updates running statistics needs those of the batch instead.
template <class Predicate>
bool reads_for_backward(const graph::Operator& op, const Predicate& of_interest) {
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    if (!op.writes.empty() && graph::is_running_statistic(op.handle.schema(), i)) continue;
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
  bool needed = std::any_of(roots_.begin(), roots_.end(),
                            [&](const auto& root) { return on_it(root.gradient); });
  for (int index : operators_) {
    const graph::Operator& op = graph_.operators[index];
    if (!reads_for_backward(op, on_it)) continue;
    if (graph::is_leaf(op.handle)) return false;
    needed |= graph::records_history(graph_, op);
  }
  return needed;
}

/// See `Parameter::copied`.
bool Stage::is_copied(ValueId value) const {
  if (!graph_.trains() || !writes(value)) return false;
  const bool separate = separated_[graph_.values[value].alias_set] != graph::kNeverSeparated;
  return separate || backward_may_need(value);
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
                               graph_.trains() && value.meta.requires_grad ? sinks_++ : kNoSink,
                               is_copied(id)});
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

bool Stage::reads_input(size_t position) const {
  return std::any_of(inputs_.begin(), inputs_.end(),
                     [&](const Input& input) { return input.position == position; });
}

/// The sink of a parameter, if it has one here.
int Stage::sink_of(ValueId value) const {
  for (const Parameter& parameter : parameters_) {
    if (parameter.value == value) return parameter.sink;
  }
  return kNoSink;
}

void Stage::find_edges() {
  for (size_t i = 0; i < edges_.size(); ++i) {
    const Edge& edge = edges_[i];
    if (edge.from != index_ && edge.to != index_) continue;
    const size_t place = own_edges_.size();
    own_edges_.push_back(static_cast<int>(i));
    edge.to == index_ ? find_incoming(edge, place) : find_outgoing(edge, place);
  }
  entered_ = kept_;
  for (const Input& input : inputs_) entered_.push_back(input.value);
  for (const Content& content : contents_) entered_.push_back(content.value);
  for (const Parameter& parameter : parameters_) entered_.push_back(parameter.value);
}

void Stage::find_incoming(const Edge& edge, size_t place) {
  Incoming incoming;
  incoming.place = place;
  for (ValueId id : edge.values) {
    const auto is_in = [id](const std::vector<ValueId>& some) {
      return std::find(some.begin(), some.end(), id) != some.end();
    };
    incoming.values.push_back({id, is_in(edge.gradients) ? sinks_++ : kNoSink,
                               is_in(edge.requiring), !is_in(edge.unlinked),
                               writes(id) && graph::is_view(graph_, id)});
    entered_.push_back(id);
  }
  const auto sink_of_value = [&](ValueId id) {
    return std::find_if(incoming.values.begin(), incoming.values.end(),
                        [&](const Entry& entry) { return entry.value == id; })
        ->sink;
  };
  for (ValueId id : edge.gradients) incoming.returning.push_back(sink_of_value(id));
  for (ValueId id : edge.replicas) incoming.returning.push_back(sink_of(id));
  for (int sink : incoming.returning) {
    if (sink != kNoSink) input_sinks_.push_back(sink);
  }
  incoming_.push_back(std::move(incoming));
}

void Stage::find_outgoing(const Edge& edge, size_t place) {
  Outgoing outgoing{place, edge.values, edge.gradients, {}};
  for (ValueId id : edge.replicas) outgoing.replicas.push_back({id, sink_of(id)});
  outgoing_.push_back(std::move(outgoing));
}

size_t Stage::place_of(int edge) const {
  const auto found = std::lower_bound(own_edges_.begin(), own_edges_.end(), edge);
  SMP_INTERNAL_ASSERT(found != own_edges_.end() && *found == edge, "stage ", index_,
                      " is at no end of edge ", edge);
  return static_cast<size_t>(found - own_edges_.begin());
}

Message& Stage::values(int microbatch, int edge) {
  return in_flight_.at(microbatch).values[place_of(edge)];
}

Message& Stage::gradients(int microbatch, int edge) {
  return in_flight_.at(microbatch).gradients[place_of(edge)];
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

/// Whatever requires a gradient in the program does so here, even if none comes back: operators
/// choose their kernels by it (matmul folds its operands), so the bits depend on it.
void Stage::enter(const Entry& entry, const at::Tensor& data, InFlight& state) {
  if (!entry.linked) {
    environment_[entry.value] = graph::enter_unlinked(data);
    return;
  }
  graph::GradientSinkPtr end;
  if (entry.sink != kNoSink || entry.requires_grad) end = core::make_node<graph::GradientSink>();
  environment_[entry.value] = graph::enter(data, end);
  if (entry.written_view) environment_[entry.value] = graph::as_view(environment_[entry.value]);
  if (entry.sink != kNoSink) state.sinks[entry.sink] = std::move(end);
}

namespace {

/// A leaf as it is made for `parameter` now, which the program may have given other data.
bool is_leaf_of(const at::Tensor& leaf, const at::Tensor& parameter) {
  return leaf.unsafeGetTensorImpl()->unsafe_storage().is_alias_of(
             parameter.unsafeGetTensorImpl()->unsafe_storage()) &&
         leaf.storage_offset() == parameter.storage_offset() && leaf.sizes() == parameter.sizes() &&
         leaf.strides() == parameter.strides() && leaf.scalar_type() == parameter.scalar_type();
}

}  // namespace

void Stage::enter_parameters(InFlight& state) {
  state.leaves.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const at::Tensor& tensor = parameter.tensor;
    Leaf& leaf = state.leaves[i];
    if (!parameter.spare.empty()) {
      leaf = std::move(parameter.spare.back());
      parameter.spare.pop_back();
    }
    if (leaf.sink != nullptr && is_leaf_of(leaf.tensor, tensor)) {
      environment_[parameter.value] = leaf.tensor;
      state.sinks[parameter.sink] = leaf.sink;
      continue;
    }
    leaf = {};
    enter({parameter.value, parameter.sink, graph_.values[parameter.value].meta.requires_grad},
          parameter.copied ? tensor.detach().clone() : tensor, state);
    const at::Tensor& entered = environment_[parameter.value];
    // A leaf gets no history while it is used.
    const bool is_leaf = parameter.sink != kNoSink && entered.is_leaf() && !parameter.copied;
    if (is_leaf) leaf = {entered, state.sinks[parameter.sink]};
  }
}

void Stage::enter_all(InFlight& state, const std::vector<at::Tensor>& inputs) {
  state.sinks.resize(sinks_);
  for (const Input& input : inputs_) {
    const at::Tensor& tensor = inputs[input.position];
    environment_[input.value] = input.written ? tensor.clone() : tensor;
  }
  for (const Content& content : contents_) {
    environment_[content.value] = content.written ? content.tensor.clone() : content.tensor;
  }
  enter_parameters(state);
  for (const Incoming& incoming : incoming_) {
    Message& received = state.values[incoming.place];
    for (size_t i = 0; i < received.size(); ++i) enter(incoming.values[i], received[i], state);
    received.clear();
  }
}

void Stage::forward(int microbatch, const std::vector<at::Tensor>& inputs,
                    const graph::RandomKey& key, const OutputConsumer& output,
                    const RootConsumer& root) {
  // Operators set the modes they were recorded in.
  at::AutoGradMode grad(true);
  InFlight& state = in_flight_[microbatch];
  if (residency_) residency_->begin(Pass::kForward, microbatch);
  enter_all(state, inputs);
  record_given(state);
  run_operators(state, key);
  if (has_backward_) keep_starts(state);
  if (root) give_roots(microbatch, root);
  keep_values(state);
  give_outputs(microbatch, output);
  if (residency_) residency_->end(Pass::kForward, microbatch);
  for (ValueId id : entered_) environment_[id].reset();
  if (!has_backward_) finish(state);
}

void Stage::run_operators(InFlight& state, const graph::RandomKey& key) {
  const bool stores = store_ != nullptr && !state.needed_soon && has_backward_;
  state.needed_soon = false;
  state.has_run = true;
  const graph::ResultObserver observer = result_observer(state);
  state.stored = segment_->run(environment_, key, stores ? store_.get() : nullptr,
                               observer ? &observer : nullptr);
  for (const Parameter& parameter : parameters_) {
    if (!parameter.copied) continue;
    parameter.tensor.detach().copy_(environment_[parameter.value].detach());
  }
  record_buffers(state);
}

/// A copy of a tensor on memory that others write, or that will not stay.
at::Tensor Stage::copy_of(const at::Tensor& tensor) const {
  if (residency_) residency_->before_read(tensor);
  const at::Tensor copy = tensor.clone();
  if (residency_) residency_->after_read(tensor);
  return copy;
}

void Stage::keep_starts(InFlight& state) const {
  for (const auto& root : roots_) {
    const at::Tensor& value = environment_[root.value];
    state.starts.push_back(graph::start_of_backward(value));
    if (root.gradient == kUndefined) {
      state.start_gradients.push_back(at::ones_like(value.detach()));
    } else {
      const at::Tensor gradient = environment_[root.gradient].detach();
      const bool stays = residency_ == nullptr || !on_shared_memory(root.gradient);
      state.start_gradients.push_back(stays ? gradient : copy_of(gradient));
    }
  }
  for (const Outgoing& outgoing : outgoing_) {
    for (ValueId id : outgoing.gradients) {
      state.starts.push_back(graph::start_of_backward(environment_[id]));
    }
    for (const Entry& replica : outgoing.replicas) {
      if (replica.sink != kNoSink) state.starts.emplace_back(state.sinks[replica.sink], 0);
    }
  }
}

void Stage::give_roots(int microbatch, const RootConsumer& consume) const {
  for (const auto& root : roots_) consume(microbatch, environment_[root.value].detach());
}

void Stage::keep_values(InFlight& state) const {
  for (const Outgoing& outgoing : outgoing_) {
    Message& values = state.values[outgoing.place];
    for (ValueId id : outgoing.values) values.push_back(environment_[id].detach());
  }
}

void Stage::give_outputs(int microbatch, const OutputConsumer& output) const {
  for (int position : returned_) {
    const ValueId id = graph_.outputs[position];
    if (id == kUndefined) {
      output(position, microbatch, at::Tensor());
      continue;
    }
    // The history of an evaluation ends with its stage.
    const at::Tensor value = graph_.trains() ? environment_[id] : environment_[id].detach();
    // Later microbatches and updates go on writing buffers and parameters.
    output(position, microbatch, copied_.count(position) > 0 ? copy_of(value) : value);
  }
}

/// Completes `start_gradients`.
void Stage::begin_backward(InFlight& state) const {
  SMP_INTERNAL_ASSERT(state.sinks.size() == static_cast<size_t>(sinks_), "stage ", index_,
                      " has a backward without a forward that kept what it needs");
  record_given_gradients(state);
  // Gradients from later stages come first into every sum, as their operators come last in the
  // program and so first in a backward pass.
  for (const Outgoing& outgoing : outgoing_) {
    Message& received = state.gradients[outgoing.place];
    size_t next = 0;
    for (size_t i = 0; i < outgoing.gradients.size(); ++i) {
      state.start_gradients.push_back(std::move(received[next++]));
    }
    for (const Entry& replica : outgoing.replicas) {
      at::Tensor& gradient = received[next++];
      if (replica.sink != kNoSink) {
        state.start_gradients.push_back(std::move(gradient));
      } else if (gradient.defined()) {
        state.foreign.emplace_back(replica.value, gradient);  // the owner does not read it itself
      }
    }
    received.clear();
  }
}

void Stage::fuse(int microbatch, InFlight& state, const GradientBuffer& buffer, bool defer) const {
  const graph::ExecutionMode& mode = graph_.roots.front().mode;
  // The buffers' products would not be cast as libtorch's own are.
  if (buffer == nullptr || mode.autocast_cpu || mode.autocast_cuda) return;
  std::vector<graph::WeightBuffer> weights;
  for (const Parameter& parameter : parameters_) {
    const auto type = parameter.tensor.scalar_type();
    const bool fits = type == at::kFloat || type == at::kDouble;
    if (!parameter.owned || parameter.sink == kNoSink || !fits) continue;
    if (uses_[graph_.values[parameter.value].alias_set] > 1) continue;
    weights.push_back({state.sinks[parameter.sink],
                       [=, &buffer] { return buffer(parameter.value, microbatch); }});
  }
  state.fusion = std::make_unique<graph::WeightFusion>(state.starts, weights, defer);
}

void Stage::backward(int microbatch, const GradientConsumer& consume,
                     const GradientBuffer& buffer) {
  InFlight& state = in_flight_[microbatch];
  begin_backward(state);
  fuse(microbatch, state, buffer, /*defer=*/false);
  take_gradients(microbatch, state, consume);
  if (residency_) residency_->begin(Pass::kBackward, microbatch);
  {
    const graph::ModeScope mode(graph_.roots.front().mode);
    graph::run_backward(state.starts, state.start_gradients);
  }
  state.start_gradients.clear();  // their memory may be a channel's
  consume_gradients(microbatch, state, consume);
  keep_gradients(state);
  finish(state);
  if (residency_) residency_->end(Pass::kBackward, microbatch);
}

void Stage::backward_inputs(int microbatch, const GradientBuffer& buffer) {
  InFlight& state = in_flight_[microbatch];
  begin_backward(state);
  fuse(microbatch, state, buffer, /*defer=*/true);
  std::vector<graph::GradientSinkPtr> inputs;
  for (int sink : input_sinks_) inputs.push_back(state.sinks[sink]);
  if (residency_) residency_->begin(Pass::kBackward, microbatch);
  {
    const graph::ModeScope mode(graph_.roots.front().mode);
    state.split =
        std::make_unique<graph::SplitBackward>(state.starts, state.start_gradients, inputs);
  }
  state.starts.clear();
  state.start_gradients.clear();
  keep_gradients(state);
}

void Stage::backward_weights(int microbatch, const GradientConsumer& consume) {
  InFlight& state = in_flight_[microbatch];
  take_gradients(microbatch, state, consume);
  if (residency_) residency_->begin(Pass::kBackward, microbatch);
  {
    const graph::ModeScope mode(graph_.roots.front().mode);
    state.split->run_weights();
  }
  if (state.fusion) state.fusion->run();
  consume_gradients(microbatch, state, consume);
  finish(state);
  if (residency_) residency_->end(Pass::kBackward, microbatch);
}

/// Each gradient goes on as soon as it is complete, so that a stage never has all of them.
void Stage::take_gradients(int microbatch, InFlight& state, const GradientConsumer& consume) const {
  state.taking = {this, &consume, microbatch};
  for (const Parameter& parameter : parameters_) {
    if (!parameter.owned || parameter.sink == kNoSink) continue;
    // No more than a function object holds without memory of its own.
    state.sinks[parameter.sink]->take = [&state, id = parameter.value](at::Tensor gradient) {
      const Taking& taking = state.taking;
      taking.stage->give_gradient(id, taking.microbatch, state, std::move(gradient),
                                  *taking.consume);
    };
  }
}

/// Passes on the gradients that other stages sent for parameters that this one does not read, and
/// those of the first half of a divided backward.
void Stage::consume_gradients(int microbatch, const InFlight& state,
                              const GradientConsumer& consume) const {
  for (const auto& [id, gradient] : state.foreign) {
    give_gradient(id, microbatch, state, gradient, consume);
  }
  for (const Parameter& parameter : parameters_) {
    if (!parameter.owned || parameter.sink == kNoSink) continue;
    at::Tensor gradient = std::exchange(state.sinks[parameter.sink]->gradient, at::Tensor());
    if (!gradient.defined()) continue;
    give_gradient(parameter.value, microbatch, state, std::move(gradient), consume);
  }
}

std::vector<graph::ValueId> Stage::consumed() const {
  std::vector<graph::ValueId> result;
  for (const Parameter& parameter : parameters_) {
    if (parameter.owned && parameter.sink != kNoSink) result.push_back(parameter.value);
  }
  for (const Outgoing& outgoing : outgoing_) {
    for (const Entry& replica : outgoing.replicas) {
      if (replica.sink == kNoSink) result.push_back(replica.value);
    }
  }
  std::sort(result.begin(), result.end());
  result.erase(std::unique(result.begin(), result.end()), result.end());
  return result;
}

void Stage::keep_gradients(InFlight& state) const {
  for (const Incoming& incoming : incoming_) {
    Message& returning = state.gradients[incoming.place];
    for (int sink : incoming.returning) {
      returning.push_back(sink == kNoSink ? at::Tensor() : state.sinks[sink]->gradient);
    }
  }
  record_gradients(state);
}

/// All but the messages.
void Stage::InFlight::forget() {
  record = nullptr;
  has_run = false;
  stored = {};
  sinks.clear();
  leaves.clear();
  starts.clear();
  start_gradients.clear();
  split.reset();
  fusion.reset();
  foreign.clear();
}

}  // namespace smp::pipeline
