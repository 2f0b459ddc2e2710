// SPDX-License-Identifier: Apache-2.0
#include "pipeline/stage.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace smp::pipeline {

Stage::Stage(const PartitionedGraph& partitioned, int index, int microbatches,
             const graph::TensorTable& table, const std::vector<int>& region_of_operator,
             std::shared_ptr<graph::TensorStore> store)
    : program_(partitioned, index),
      segment_(program_.facts, program_.operators, program_.kept, region_of_operator),
      store_(std::move(store)),
      shares_casts_(microbatches > 1),
      tensors_{{}, {}, *partitioned.environment},
      states_(microbatches) {
  for (const auto& parameter : program_.parameters) {
    const std::string& name = program_.graph.values[parameter.value].name;
    tensors_.parameters.push_back({table.at(name).tensor, {}});
  }
  for (const auto& content : program_.contents) {
    tensors_.contents.push_back(program_.graph.values[content.value].content);
  }
  for (int m = 0; m < microbatches; ++m) {
    states_[m].microbatch = m;
    states_[m].values.resize(program_.own_edges.size());
    states_[m].gradients.resize(program_.own_edges.size());
  }
}

void Stage::begin_step() {
  if (shares_casts_) segment_.casts().begin_step();
}

void Stage::reserve_casts() {
  if (shares_casts_) segment_.casts().reserve();
}

Message& Stage::message(int microbatch, int edge, bool is_backward) {
  StageState& state = states_.at(microbatch);
  return (is_backward ? state.gradients : state.values)[program_.place_of(edge)];
}

void Stage::apply(const std::vector<graph::ConstantOverride>& constants,
                  const std::vector<graph::ContentOverride>& contents) {
  segment_.apply(constants);
  for (const auto& change : contents) {
    for (size_t i = 0; i < program_.contents.size(); ++i) {
      if (program_.contents[i].value == change.value) tensors_.contents[i] = change.content;
    }
  }
}

void Stage::forward(int microbatch, const std::vector<at::Tensor>& inputs,
                    const graph::RandomKey& key, StepResults& results) {
  // Operators set the modes they were recorded in.
  at::AutoGradMode grad(true);
  StageState& state = states_[microbatch];
  SMP_INTERNAL_ASSERT(!state.has_run, "stage ", program_.index,
                      " has run the forward of microbatch ", microbatch, " already");
  enter(program_, inputs, tensors_, state);
  record_given(program_, tensors_, state);
  run_operators(state, key);
  leave(program_, tensors_, state, results);
  for (const auto* values : {&program_.entered, &program_.kept}) {
    for (graph::ValueId id : *values) tensors_.environment[id].reset();
  }
  if (!program_.has_backward) finish(state);
}

void Stage::run_operators(StageState& state, const graph::RandomKey& key) {
  const bool stores = store_ != nullptr && !state.needed_soon && program_.has_backward;
  state.needed_soon = false;
  state.has_run = true;
  const graph::ResultObserver observer = result_observer(program_, state);
  state.stored = segment_.run(tensors_.environment, key, stores ? store_.get() : nullptr,
                              observer ? &observer : nullptr);
  for (size_t i = 0; i < program_.parameters.size(); ++i) {
    const StageProgram::Parameter& parameter = program_.parameters[i];
    if (!parameter.copied) continue;
    const at::Tensor& written = tensors_.environment[parameter.value];
    tensors_.parameters[i].tensor.detach().copy_(written.detach());
  }
  record_buffers(program_, tensors_, state);
}

Gradients Stage::backward(const Action& action, GradientSums* sums) {
  StageState& state = states_[action.microbatch];
  if (action.kind == Action::Kind::kBackwardInput) {
    backward_inputs(program_, state, sums);
    return {};
  }
  Gradients rest = action.kind == Action::Kind::kBackward
                       ? pipeline::backward(program_, state, sums)
                       : backward_weights(program_, state, sums);
  finish(state);
  return rest;
}

/// The microbatch is done: its leaves are there for the next one.
void Stage::finish(StageState& state) {
  for (size_t i = 0; i < state.leaves.size(); ++i) {
    ParameterLeaf& leaf = state.leaves[i];
    if (leaf.sink == nullptr) continue;
    leaf.sink->gradient.reset();
    leaf.sink->take = nullptr;
    tensors_.parameters[i].spare.push_back(std::move(leaf));
  }
  state.forget();
}

core::Refusal Stage::why_no_device_graphs() const {
  if (store_) return "activations are offloaded (\"offload_activations\")";
  return program_.why_no_device_graphs();
}

std::vector<const void*> Stage::addresses() const {
  std::vector<const void*> addresses;
  for (const auto& parameter : tensors_.parameters) {
    addresses.push_back(parameter.tensor.const_data_ptr());
  }
  return addresses;
}

void Stage::forget_leaves() {
  for (auto& parameter : tensors_.parameters) parameter.spare.clear();
}

void Stage::check_done() const {
  const auto is_taken = [](const Message& message) { return message.empty(); };
  for (const StageState& state : states_) {
    SMP_INTERNAL_ASSERT(!state.has_run, "stage ", program_.index, " keeps microbatch ",
                        state.microbatch, " after the step");
    for (const auto* messages : {&state.values, &state.gradients}) {
      SMP_INTERNAL_ASSERT(std::all_of(messages->begin(), messages->end(), is_taken), "stage ",
                          program_.index, " has a message of microbatch ", state.microbatch,
                          " after the step");
    }
  }
}

void Stage::forget_microbatches() {
  for (StageState& state : states_) {
    state.forget();
    for (Message& message : state.values) message.clear();
    for (Message& message : state.gradients) message.clear();
  }
  for (at::Tensor& tensor : tensors_.environment) tensor.reset();
  forget_leaves();
}

}  // namespace smp::pipeline
