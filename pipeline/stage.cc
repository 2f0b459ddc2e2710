// SPDX-License-Identifier: Apache-2.0
#include "pipeline/stage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/node.h"
#include "graph/content.h"
#include "graph/memory_layout.h"
#include "graph/mode_scope.h"

namespace smp::pipeline {

using graph::kUndefined;
using graph::ValueId;

Stage::Stage(const graph::Graph& graph, const partitioner::Plan& plan,
             const std::vector<Edge>& edges, int index, int microbatches,
             const graph::TensorTable& table)
    : program_(graph, plan, edges, index),
      segment_(
          std::make_unique<graph::CheckpointedSegment>(graph, program_.operators, program_.kept)),
      shares_casts_(microbatches > 1),
      may_wait_(program_.calls_foreign()),
      environment_(graph.values.size()),
      in_flight_(microbatches) {
  for (const auto& parameter : program_.parameters) {
    held_.push_back({table.at(graph.values[parameter.value].name).tensor, {}});
  }
  for (const auto& content : program_.contents) {
    contents_.push_back(graph.values[content.value].content);
  }
  for (InFlight& state : in_flight_) {
    state.values.resize(program_.own_edges.size());
    state.gradients.resize(program_.own_edges.size());
  }
}

void Stage::set_regions(const std::vector<int>& region_of_operator,
                        std::shared_ptr<graph::TensorStore> store) {
  store_ = std::move(store);
  segment_ = std::make_unique<graph::CheckpointedSegment>(program_.graph, program_.operators,
                                                          program_.kept, region_of_operator);
}

void Stage::begin_step() {
  if (shares_casts_) segment_->casts().begin_step();
}

void Stage::reserve_casts() {
  if (shares_casts_) segment_->casts().reserve();
}

void Stage::prefetch(int microbatch) {
  InFlight& state = in_flight_[microbatch];
  if (state.has_run) {
    state.stored.prefetch();
  } else {
    state.needed_soon = true;
  }
}

Message& Stage::values(int microbatch, int edge) {
  return in_flight_.at(microbatch).values[program_.place_of(edge)];
}

Message& Stage::gradients(int microbatch, int edge) {
  return in_flight_.at(microbatch).gradients[program_.place_of(edge)];
}

void Stage::apply(const std::vector<graph::ConstantOverride>& constants,
                  const std::vector<graph::ContentOverride>& contents) {
  segment_->apply(constants);
  for (const auto& change : contents) {
    for (size_t i = 0; i < contents_.size(); ++i) {
      if (program_.contents[i].value == change.value) contents_[i] = change.content;
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
  const bool has_sink = entry.sink != StageProgram::kNoSink;
  if (has_sink || entry.requires_grad) end = core::make_node<graph::GradientSink>();
  environment_[entry.value] = graph::enter(data, end);
  if (entry.written_view) environment_[entry.value] = graph::as_view(environment_[entry.value]);
  if (has_sink) state.sinks[entry.sink] = std::move(end);
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
  state.leaves.resize(held_.size());
  for (size_t i = 0; i < held_.size(); ++i) {
    const StageProgram::Parameter& parameter = program_.parameters[i];
    auto& [tensor, spare] = held_[i];
    Leaf& leaf = state.leaves[i];
    if (!spare.empty()) {
      leaf = std::move(spare.back());
      spare.pop_back();
    }
    if (leaf.sink != nullptr && is_leaf_of(leaf.tensor, tensor)) {
      environment_[parameter.value] = leaf.tensor;
      state.sinks[parameter.sink] = leaf.sink;
      continue;
    }
    leaf = {};
    enter({parameter.value, parameter.sink,
           program_.graph.values[parameter.value].meta.requires_grad},
          parameter.copied ? graph::copy_as_laid_out(tensor) : tensor, state);
    const at::Tensor& entered = environment_[parameter.value];
    // A leaf gets no history while it is used.
    const bool is_leaf =
        parameter.sink != StageProgram::kNoSink && entered.is_leaf() && !parameter.copied;
    if (is_leaf) leaf = {entered, state.sinks[parameter.sink]};
  }
}

void Stage::enter_all(InFlight& state, const std::vector<at::Tensor>& inputs) {
  state.sinks.resize(program_.sinks);
  for (const auto& input : program_.inputs) {
    const at::Tensor& tensor = inputs[input.position];
    environment_[input.value] = input.written ? graph::copy_to(tensor.device(), tensor) : tensor;
  }
  for (size_t i = 0; i < contents_.size(); ++i) {
    const auto& [value, written] = program_.contents[i];
    environment_[value] = written ? graph::clone_content(contents_[i]) : contents_[i];
  }
  enter_parameters(state);
  for (const auto& incoming : program_.incoming) {
    Message& received = state.values[incoming.place];
    for (size_t i = 0; i < received.size(); ++i) enter(incoming.values[i], received[i], state);
    received.clear();
  }
}

void Stage::forward(int microbatch, const std::vector<at::Tensor>& inputs,
                    const graph::RandomKey& key, StepResults& results) {
  // Operators set the modes they were recorded in.
  at::AutoGradMode grad(true);
  InFlight& state = in_flight_[microbatch];
  SMP_INTERNAL_ASSERT(!state.has_run, "stage ", program_.index,
                      " has run the forward of microbatch ", microbatch, " already");
  enter_all(state, inputs);
  record_given(state);
  run_operators(state, key);
  if (program_.has_backward) keep_starts(state);
  if (results.keeps_losses) give_losses(microbatch, results);
  keep_values(state);
  give_outputs(microbatch, results);
  for (ValueId id : program_.entered) environment_[id].reset();
  if (!program_.has_backward) finish(state);
}

void Stage::run_operators(InFlight& state, const graph::RandomKey& key) {
  const bool stores = store_ != nullptr && !state.needed_soon && program_.has_backward;
  state.needed_soon = false;
  state.has_run = true;
  const graph::ResultObserver observer = result_observer(state);
  state.stored = segment_->run(environment_, key, stores ? store_.get() : nullptr,
                               observer ? &observer : nullptr);
  for (size_t i = 0; i < held_.size(); ++i) {
    if (!program_.parameters[i].copied) continue;
    held_[i].tensor.detach().copy_(environment_[program_.parameters[i].value].detach());
  }
  record_buffers(state);
}

void Stage::keep_starts(InFlight& state) const {
  for (const auto& root : program_.roots) {
    const at::Tensor& value = environment_[root.value];
    state.starts.push_back(graph::start_of_backward(value));
    if (root.gradient == kUndefined) {
      state.start_gradients.push_back(at::ones_like(value.detach()));
    } else {
      state.start_gradients.push_back(environment_[root.gradient].detach());
    }
  }
  for (const auto& outgoing : program_.outgoing) {
    for (ValueId id : outgoing.gradients) {
      state.starts.push_back(graph::start_of_backward(environment_[id]));
    }
    for (const Entry& replica : outgoing.replicas) {
      if (replica.sink == StageProgram::kNoSink) continue;
      state.starts.emplace_back(state.sinks[replica.sink], 0);
    }
  }
}

/// Copies, since the program may write the tensor that it got.
void Stage::give_losses(int microbatch, StepResults& results) const {
  for (const auto& root : program_.roots) {
    const at::Tensor& value = environment_[root.value];
    if (value.numel() != 1 || !value.is_floating_point()) continue;
    results.losses.push_back({microbatch, value.detach().clone()});
  }
}

void Stage::keep_values(InFlight& state) const {
  for (const auto& outgoing : program_.outgoing) {
    Message& values = state.values[outgoing.place];
    for (ValueId id : outgoing.values) values.push_back(environment_[id].detach());
  }
}

void Stage::give_outputs(int microbatch, StepResults& results) const {
  for (int position : program_.returned) {
    const ValueId id = program_.graph.outputs[position];
    if (id == kUndefined) continue;
    // The history of an evaluation ends with its stage.
    const bool keeps_history = results.keeps_history && program_.graph.trains();
    const at::Tensor value = keeps_history ? environment_[id] : environment_[id].detach();
    // Later microbatches and updates go on writing buffers and parameters.
    const bool is_copied = program_.copied.count(position) > 0;
    results.outputs.push_back({position, microbatch, is_copied ? value.clone() : value});
  }
}

/// Completes `start_gradients`.
void Stage::begin_backward(InFlight& state) const {
  SMP_INTERNAL_ASSERT(state.sinks.size() == static_cast<size_t>(program_.sinks), "stage ",
                      program_.index, " has a backward without a forward that kept what it needs");
  record_given_gradients(state);
  // Gradients from later stages come first into every sum, as their operators come last in the
  // program and so first in a backward pass.
  for (const auto& outgoing : program_.outgoing) {
    Message& received = state.gradients[outgoing.place];
    size_t next = 0;
    for (size_t i = 0; i < outgoing.gradients.size(); ++i) {
      state.start_gradients.push_back(std::move(received[next++]));
    }
    for (const Entry& replica : outgoing.replicas) {
      at::Tensor& gradient = received[next++];
      if (replica.sink != StageProgram::kNoSink) {
        state.start_gradients.push_back(std::move(gradient));
      } else if (gradient.defined()) {
        state.foreign.emplace_back(replica.value, gradient);  // the owner does not read it itself
      }
    }
    received.clear();
  }
}

void Stage::fuse(int microbatch, InFlight& state, GradientSums* sums, bool defer) const {
  const graph::ExecutionMode& mode = program_.graph.roots.front().mode;
  // The buffers' products would not be cast as libtorch's own are.
  if (sums == nullptr || !sums->fuses() || mode.autocast_cpu || mode.autocast_accelerator) return;
  std::vector<graph::WeightBuffer> weights;
  for (size_t i = 0; i < held_.size(); ++i) {
    const StageProgram::Parameter& parameter = program_.parameters[i];
    const auto type = held_[i].tensor.scalar_type();
    const bool fits = type == at::kFloat || type == at::kDouble;
    if (!parameter.gives_gradient() || !fits) continue;
    if (program_.uses[program_.graph.values[parameter.value].alias_set] > 1) continue;
    weights.push_back({state.sinks[parameter.sink], [sums, id = parameter.value, microbatch] {
                         return sums->buffer(id, microbatch);
                       }});
  }
  state.fusion = std::make_unique<graph::WeightFusion>(state.starts, weights, defer);
}

Gradients Stage::backward(int microbatch, GradientSums* sums) {
  InFlight& state = in_flight_[microbatch];
  begin_backward(state);
  fuse(microbatch, state, sums, /*defer=*/false);
  take_gradients(microbatch, state, sums);
  {
    const graph::ModeScope mode(program_.graph.roots.front().mode);
    graph::run_backward(state.starts, state.start_gradients);
  }
  state.start_gradients.clear();  // their memory may be a channel's
  Gradients rest = give_rest(microbatch, state, sums);
  keep_gradients(state);
  finish(state);
  return rest;
}

Gradients Stage::backward(const Action& action, GradientSums* sums) {
  if (action.kind == Action::Kind::kBackward) return backward(action.microbatch, sums);
  if (action.kind == Action::Kind::kBackwardWeight) {
    return backward_weights(action.microbatch, sums);
  }
  backward_inputs(action.microbatch, sums);
  return {};
}

void Stage::backward_inputs(int microbatch, GradientSums* sums) {
  InFlight& state = in_flight_[microbatch];
  begin_backward(state);
  fuse(microbatch, state, sums, /*defer=*/true);
  std::vector<graph::GradientSinkPtr> inputs;
  for (int sink : program_.input_sinks) inputs.push_back(state.sinks[sink]);
  {
    const graph::ModeScope mode(program_.graph.roots.front().mode);
    state.split =
        std::make_unique<graph::SplitBackward>(state.starts, state.start_gradients, inputs);
  }
  state.starts.clear();
  state.start_gradients.clear();
  keep_gradients(state);
}

Gradients Stage::backward_weights(int microbatch, GradientSums* sums) {
  InFlight& state = in_flight_[microbatch];
  take_gradients(microbatch, state, sums);
  {
    const graph::ModeScope mode(program_.graph.roots.front().mode);
    state.split->run_weights();
  }
  if (state.fusion) state.fusion->run();
  Gradients rest = give_rest(microbatch, state, sums);
  finish(state);
  return rest;
}

/// Each gradient goes on as soon as it is complete, so that a stage never has all of them. One that
/// is recorded and has no sum goes.
void Stage::take_gradients(int microbatch, InFlight& state, GradientSums* sums) const {
  if (sums == nullptr && state.record == nullptr) return;
  state.taking = {this, sums, microbatch};
  for (const auto& parameter : program_.parameters) {
    if (!parameter.gives_gradient()) continue;
    // No more than a function object holds without memory of its own.
    state.sinks[parameter.sink]->take = [&state, id = parameter.value](at::Tensor gradient) {
      const Taking& taking = state.taking;
      taking.stage->record_gradient(id, gradient, state);
      if (taking.sums != nullptr) taking.sums->add(id, taking.microbatch, std::move(gradient));
    };
  }
}

/// Passes on the gradients that are not taken: those that other stages sent for parameters that
/// this one does not read, and those of the first half of a divided backward.
Gradients Stage::give_rest(int microbatch, const InFlight& state, GradientSums* sums) const {
  Gradients rest = state.foreign;
  for (const auto& parameter : program_.parameters) {
    if (!parameter.gives_gradient()) continue;
    at::Tensor gradient = std::exchange(state.sinks[parameter.sink]->gradient, at::Tensor());
    if (gradient.defined()) rest.emplace_back(parameter.value, std::move(gradient));
  }
  for (const auto& [id, gradient] : rest) record_gradient(id, gradient, state);
  if (sums == nullptr) return rest;
  for (auto& [id, gradient] : rest) sums->add(id, microbatch, std::move(gradient));
  return {};
}

void Stage::keep_gradients(InFlight& state) const {
  for (const auto& incoming : program_.incoming) {
    Message& returning = state.gradients[incoming.place];
    for (int sink : incoming.returning) {
      returning.push_back(sink == StageProgram::kNoSink ? at::Tensor()
                                                        : std::move(state.sinks[sink]->gradient));
    }
  }
  record_gradients(state);
}

core::Refusal Stage::why_no_device_graphs() const {
  if (store_) return "activations are offloaded (\"offload_activations\")";
  return program_.why_no_device_graphs();
}

std::vector<const void*> Stage::addresses() const {
  std::vector<const void*> addresses;
  for (const Held& held : held_) addresses.push_back(held.tensor.const_data_ptr());
  return addresses;
}

void Stage::forget_leaves() {
  for (Held& held : held_) held.spare.clear();
}

void Stage::check_done() const {
  const auto is_taken = [](const Message& message) { return message.empty(); };
  for (size_t m = 0; m < in_flight_.size(); ++m) {
    const InFlight& state = in_flight_[m];
    SMP_INTERNAL_ASSERT(!state.has_run, "stage ", program_.index, " keeps microbatch ", m,
                        " after the step");
    for (const auto* messages : {&state.values, &state.gradients}) {
      SMP_INTERNAL_ASSERT(std::all_of(messages->begin(), messages->end(), is_taken), "stage ",
                          program_.index, " has a message of microbatch ", m, " after the step");
    }
  }
}

void Stage::forget_microbatches() {
  for (InFlight& state : in_flight_) {
    state.forget();
    for (Message& message : state.values) message.clear();
    for (Message& message : state.gradients) message.clear();
  }
  for (at::Tensor& tensor : environment_) tensor.reset();
  forget_leaves();
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
