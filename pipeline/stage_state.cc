// SPDX-License-Identifier: Apache-2.0
#include "pipeline/stage_state.h"

#include <ATen/ops/ones_like.h>

#include <utility>

#include "core/check.h"
#include "core/node.h"
#include "graph/content.h"
#include "graph/memory_layout.h"
#include "graph/mode_scope.h"

namespace smp::pipeline {

using graph::Environment;
using graph::kUndefined;
using graph::ValueId;

namespace {

using Entry = StageProgram::Entry;

/// Whatever requires a gradient in the program does so here, even if none comes back: operators
/// choose their kernels by it (matmul folds its operands), so the bits depend on it.
void enter_one(const Entry& entry, const at::Tensor& data, StageState& state,
               Environment& environment) {
  if (!entry.linked) {
    environment[entry.value] = graph::enter_unlinked(data);
    return;
  }
  graph::GradientSinkPtr end;
  const bool has_sink = entry.sink != StageProgram::kNoSink;
  if (has_sink || entry.requires_grad) end = core::make_node<graph::GradientSink>();
  environment[entry.value] = graph::enter(data, end);
  if (entry.written_view) environment[entry.value] = graph::as_view(environment[entry.value]);
  if (has_sink) state.sinks[entry.sink] = std::move(end);
}

/// A leaf as it is made for `parameter` now, which the program may have given other data.
bool is_leaf_of(const at::Tensor& leaf, const at::Tensor& parameter) {
  return leaf.unsafeGetTensorImpl()->unsafe_storage().is_alias_of(
             parameter.unsafeGetTensorImpl()->unsafe_storage()) &&
         leaf.storage_offset() == parameter.storage_offset() && leaf.sizes() == parameter.sizes() &&
         leaf.strides() == parameter.strides() && leaf.scalar_type() == parameter.scalar_type();
}

void enter_parameters(const StageProgram& program, StageTensors& tensors, StageState& state) {
  Environment& environment = tensors.environment;
  state.leaves.resize(tensors.parameters.size());
  for (size_t i = 0; i < tensors.parameters.size(); ++i) {
    const StageProgram::Parameter& parameter = program.parameters[i];
    auto& [tensor, spare] = tensors.parameters[i];
    ParameterLeaf& leaf = state.leaves[i];
    if (!spare.empty()) {
      leaf = std::move(spare.back());
      spare.pop_back();
    }
    if (leaf.sink != nullptr && is_leaf_of(leaf.tensor, tensor)) {
      environment[parameter.value] = leaf.tensor;
      state.sinks[parameter.sink] = leaf.sink;
      continue;
    }
    leaf = {};
    const bool requires_grad = program.graph.values[parameter.value].meta.requires_grad;
    enter_one({parameter.value, parameter.sink, requires_grad},
              parameter.copied ? graph::copy_as_laid_out(tensor) : tensor, state, environment);
    const at::Tensor& entered = environment[parameter.value];
    // A leaf gets no history while it is used.
    const bool is_leaf =
        parameter.sink != StageProgram::kNoSink && entered.is_leaf() && !parameter.copied;
    if (is_leaf) leaf = {entered, state.sinks[parameter.sink]};
  }
}

void keep_starts(const StageProgram& program, const Environment& environment, StageState& state) {
  for (const auto& root : program.roots) {
    const at::Tensor& value = environment[root.value];
    state.starts.push_back(graph::start_of_backward(value));
    if (root.gradient == kUndefined) {
      state.start_gradients.push_back(at::ones_like(value.detach()));
    } else {
      state.start_gradients.push_back(environment[root.gradient].detach());
    }
  }
  for (const auto& outgoing : program.outgoing) {
    for (ValueId id : outgoing.gradients) {
      state.starts.push_back(graph::start_of_backward(environment[id]));
    }
    for (const Entry& replica : outgoing.replicas) {
      if (replica.sink == StageProgram::kNoSink) continue;
      state.starts.emplace_back(state.sinks[replica.sink], 0);
    }
  }
}

/// Copies, since the program may write the tensor that it got.
void give_losses(const StageProgram& program, const Environment& environment, int microbatch,
                 StepResults& results) {
  for (const auto& root : program.roots) {
    const at::Tensor& value = environment[root.value];
    if (value.numel() != 1 || !value.is_floating_point()) continue;
    results.losses.push_back({microbatch, value.detach().clone()});
  }
}

/// A returned tensor with its history, which ends in the leaves of this stage. The microbatches of
/// the next step have the same leaves: a backward through it would be added to theirs.
at::Tensor with_history(const at::Tensor& value) {
  if (!value.requires_grad()) return value;
  const at::Tensor kept = graph::as_view(value);
  kept.register_hook([](const at::Tensor& /*gradient*/) {
    core::fail<UsageError>(
        "a tensor that the step function returned with its history (detach_outputs(false)) was "
        "differentiated, and no parameter gets a gradient by that. Call model->backward(tensor) "
        "inside the step function");
  });
  return kept;
}

void give_outputs(const StageProgram& program, const Environment& environment, int microbatch,
                  StepResults& results) {
  for (int position : program.returned) {
    const ValueId id = program.graph.outputs[position];
    if (id == kUndefined) continue;
    // The history of an evaluation ends with its stage.
    const bool keeps_history = results.keeps_history && program.graph.trains();
    const at::Tensor value =
        keeps_history ? with_history(environment[id]) : environment[id].detach();
    // Later microbatches and updates go on writing buffers and parameters.
    const bool is_copied = program.copied.count(position) > 0;
    results.outputs.push_back({position, microbatch, is_copied ? value.clone() : value});
  }
}

/// Completes `start_gradients`.
void begin_backward(const StageProgram& program, StageState& state) {
  SMP_INTERNAL_ASSERT(state.sinks.size() == static_cast<size_t>(program.sinks), "stage ",
                      program.index, " has a backward without a forward that kept what it needs");
  record_given_gradients(program, state);
  // Gradients from later stages come first into every sum, as their operators come last in the
  // program and so first in a backward pass.
  for (const auto& outgoing : program.outgoing) {
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

void fuse(const StageProgram& program, StageState& state, GradientSums* sums, bool defer) {
  const graph::ExecutionMode& mode = program.graph.roots.front().mode;
  // The buffers' products would not be cast as libtorch's own are.
  if (sums == nullptr || !sums->fuses() || mode.autocast_cpu || mode.autocast_accelerator) return;
  std::vector<graph::WeightBuffer> weights;
  for (const auto& parameter : program.parameters) {
    const graph::Value& value = program.graph.values[parameter.value];
    const bool fits = value.meta.dtype == at::kFloat || value.meta.dtype == at::kDouble;
    if (!parameter.gives_gradient() || !fits || program.facts.uses[value.alias_set] > 1) continue;
    weights.push_back(
        {state.sinks[parameter.sink], [sums, id = parameter.value, number = state.microbatch] {
           return sums->buffer(id, number);
         }});
  }
  state.fusion = std::make_unique<graph::WeightFusion>(state.starts, weights, defer);
}

/// Each gradient goes on as soon as it is complete, so that a stage never has all of them. One that
/// is recorded and has no sum goes.
void take_gradients(const StageProgram& program, StageState& state, GradientSums* sums) {
  if (sums == nullptr && state.record == nullptr) return;
  state.sums = sums;
  for (const auto& parameter : program.parameters) {
    if (!parameter.gives_gradient()) continue;
    // No more than a function object holds without memory of its own.
    state.sinks[parameter.sink]->take = [&state, id = parameter.value](at::Tensor gradient) {
      record_gradient(id, gradient, state);
      if (state.sums != nullptr) state.sums->add(id, state.microbatch, std::move(gradient));
    };
  }
}

/// Passes on the gradients that are not taken: those that other stages sent for parameters that
/// this one does not read, and those of the first half of a divided backward.
Gradients give_rest(const StageProgram& program, const StageState& state, GradientSums* sums) {
  Gradients rest = state.foreign;
  for (const auto& parameter : program.parameters) {
    if (!parameter.gives_gradient()) continue;
    at::Tensor gradient = std::exchange(state.sinks[parameter.sink]->gradient, at::Tensor());
    if (gradient.defined()) rest.emplace_back(parameter.value, std::move(gradient));
  }
  for (const auto& [id, gradient] : rest) record_gradient(id, gradient, state);
  if (sums == nullptr) return rest;
  for (auto& [id, gradient] : rest) sums->add(id, state.microbatch, std::move(gradient));
  return {};
}

/// Puts the gradients that other stages wait for into their messages.
void keep_gradients(const StageProgram& program, StageState& state) {
  for (const auto& incoming : program.incoming) {
    Message& returning = state.gradients[incoming.place];
    for (int sink : incoming.returning) {
      returning.push_back(sink == StageProgram::kNoSink ? at::Tensor()
                                                        : std::move(state.sinks[sink]->gradient));
    }
  }
  record_gradients(program, state);
}

}  // namespace

void enter(const StageProgram& program, const std::vector<at::Tensor>& inputs,
           StageTensors& tensors, StageState& state) {
  Environment& environment = tensors.environment;
  state.sinks.resize(program.sinks);
  for (const auto& input : program.inputs) {
    const at::Tensor& tensor = inputs[input.position];
    environment[input.value] = input.written ? graph::copy_to(tensor.device(), tensor) : tensor;
  }
  for (size_t i = 0; i < tensors.contents.size(); ++i) {
    const auto& [value, written] = program.contents[i];
    const at::Tensor& content = tensors.contents[i];
    environment[value] = written ? graph::clone_content(content) : content;
  }
  enter_parameters(program, tensors, state);
  for (const auto& incoming : program.incoming) {
    Message& received = state.values[incoming.place];
    for (size_t i = 0; i < received.size(); ++i) {
      enter_one(incoming.values[i], received[i], state, environment);
    }
    received.clear();
  }
}

void leave(const StageProgram& program, const StageTensors& tensors, StageState& state,
           StepResults& results) {
  const Environment& environment = tensors.environment;
  if (program.has_backward) keep_starts(program, environment, state);
  if (results.keeps_losses) give_losses(program, environment, state.microbatch, results);
  for (const auto& outgoing : program.outgoing) {
    Message& values = state.values[outgoing.place];
    for (ValueId id : outgoing.values) values.push_back(environment[id].detach());
  }
  give_outputs(program, environment, state.microbatch, results);
}

Gradients backward(const StageProgram& program, StageState& state, GradientSums* sums) {
  begin_backward(program, state);
  fuse(program, state, sums, /*defer=*/false);
  take_gradients(program, state, sums);
  {
    const graph::ModeScope mode(program.graph.roots.front().mode);
    graph::run_backward(state.starts, state.start_gradients);
  }
  state.start_gradients.clear();  // their memory may be a channel's
  Gradients rest = give_rest(program, state, sums);
  keep_gradients(program, state);
  return rest;
}

void backward_inputs(const StageProgram& program, StageState& state, GradientSums* sums) {
  begin_backward(program, state);
  fuse(program, state, sums, /*defer=*/true);
  std::vector<graph::GradientSinkPtr> inputs;
  for (int sink : program.input_sinks) inputs.push_back(state.sinks[sink]);
  {
    const graph::ModeScope mode(program.graph.roots.front().mode);
    state.split =
        std::make_unique<graph::SplitBackward>(state.starts, state.start_gradients, inputs);
  }
  state.starts.clear();
  state.start_gradients.clear();
  keep_gradients(program, state);
}

Gradients backward_weights(const StageProgram& program, StageState& state, GradientSums* sums) {
  take_gradients(program, state, sums);
  {
    const graph::ModeScope mode(program.graph.roots.front().mode);
    state.split->run_weights();
  }
  if (state.fusion) state.fusion->run();
  return give_rest(program, state, sums);
}

void StageState::prefetch() {
  if (has_run) stored.prefetch();
  needed_soon = !has_run;
}

void StageState::forget() {
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
