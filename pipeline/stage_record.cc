// SPDX-License-Identifier: Apache-2.0
#include "pipeline/stage_record.h"

#include <utility>

#include "core/check.h"
#include "graph/content.h"
#include "graph/memory_layout.h"
#include "pipeline/stage.h"

// Records the work of a stage, and repeats it.
namespace smp::pipeline {

using graph::ValueId;
using graph::ValueKind;
using Kind = TensorHash::Kind;

namespace {

uint64_t hash_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided ? graph::hash_content(tensor) : 0;
}

/// Copies a tensor as it lies to memory of its own. One that has no memory stays so.
at::Tensor copied(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor._is_zerotensor()) return tensor;
  return graph::copy_as_laid_out(tensor);
}

}  // namespace

void record_given(const StageProgram& program, const StageTensors& tensors, StageState& state) {
  if (state.record == nullptr || !state.record->keeps_given) return;
  for (ValueId id : program.entered) {
    const at::Tensor tensor = tensors.environment[id].detach();
    // Received tensors lie on memory that goes back to its sender.
    const bool stays = program.graph.values[id].kind != ValueKind::kResult && !program.writes(id);
    state.record->given.push_back(stays ? tensor : copied(tensor));
  }
}

void record_given_gradients(const StageProgram& program, StageState& state) {
  if (state.record == nullptr || !state.record->keeps_given) return;
  for (const auto& outgoing : program.outgoing) {
    for (const at::Tensor& gradient : state.gradients[outgoing.place]) {
      state.record->given.push_back(copied(gradient));
    }
  }
}

graph::ResultObserver result_observer(const StageProgram& program, StageState& state) {
  if (state.record == nullptr) return nullptr;
  return [&program, record = state.record](int index, size_t number, const at::Tensor& result) {
    if (!graph::computes(program.graph, index, number)) return;
    record->hashes.push_back({Kind::kResult, index, static_cast<int64_t>(number), hash_of(result)});
  };
}

void record_buffers(const StageProgram& program, const StageTensors& tensors, StageState& state) {
  if (state.record == nullptr) return;
  for (size_t i = 0; i < program.parameters.size(); ++i) {
    const ValueId id = program.parameters[i].value;
    if (!program.writes(id)) continue;
    const uint64_t hash = hash_of(tensors.parameters[i].tensor);
    state.record->hashes.push_back({Kind::kBuffer, id, 0, hash});
  }
}

void record_gradient(ValueId parameter, const at::Tensor& gradient, const StageState& state) {
  // Sums to which products have added themselves are missing in it.
  if (state.record == nullptr || state.fusion != nullptr) return;
  state.record->hashes.push_back({Kind::kParameterGradient, parameter, 0, hash_of(gradient)});
}

void record_gradients(const StageProgram& program, const StageState& state) {
  if (state.record == nullptr) return;
  for (const auto& incoming : program.incoming) {
    const Edge& edge = program.edges[program.own_edges[incoming.place]];
    const std::vector<ValueId> values = edge.returning();
    const Message& returning = state.gradients[incoming.place];
    for (size_t i = 0; i < values.size(); ++i) {
      state.record->hashes.push_back(
          {Kind::kGradient, values[i], edge.from, hash_of(returning[i])});
    }
  }
}

void Stage::run_again(const std::vector<at::Tensor>& given, const graph::RandomKey& key,
                      StageRecord& record) {
  StageState& state = states_.front();
  auto next = given.begin();
  const auto own = [&](ValueId id) {
    return program_.writes(id) ? copied(*next++) : next++->detach();
  };
  for (size_t i = 0; i < tensors_.parameters.size(); ++i) {
    const ValueId id = program_.parameters[i].value;
    at::Tensor& parameter = tensors_.parameters[i].tensor;
    parameter = own(id);
    parameter.set_requires_grad(program_.graph.values[id].meta.requires_grad);
  }
  std::vector<at::Tensor> inputs(program_.graph.inputs.size());
  for (const auto& input : program_.inputs) inputs[input.position] = *next++;
  for (size_t i = 0; i < tensors_.contents.size(); ++i) {
    at::Tensor& content = tensors_.contents[i];
    content = next++->detach();
    // A message carries neither wide gaps nor that it is a number.
    const at::Tensor& recorded = program_.graph.values[program_.contents[i].value].content;
    if (graph::same_content(recorded, content)) {
      content = recorded;
    } else if (recorded.unsafeGetTensorImpl()->is_wrapped_number()) {
      content.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
  }
  for (const auto& incoming : program_.incoming) {
    Message& values = state.values[incoming.place];
    for (const StageProgram::Entry& entry : incoming.values) values.push_back(own(entry.value));
  }
  state.record = &record;
  StepResults results;
  forward(0, inputs, key, results);
  for (const auto& outgoing : program_.outgoing) state.values[outgoing.place].clear();
  if (program_.has_backward) {
    for (const auto& outgoing : program_.outgoing) {
      const auto count = static_cast<int64_t>(outgoing.gradients.size() + outgoing.replicas.size());
      state.gradients[outgoing.place].assign(next, next + count);
      next += count;
    }
    backward({Action::Kind::kBackward, index(), 0}, /*sums=*/nullptr);
    for (const auto& incoming : program_.incoming) state.gradients[incoming.place].clear();
  }
  SMP_INTERNAL_ASSERT(next == given.end(), "stage ", program_.index, " was given ", given.size(),
                      " tensors to run again from, and reads ", next - given.begin());
  for (auto& parameter : tensors_.parameters) parameter = {};
  for (at::Tensor& content : tensors_.contents) content.reset();
}

}  // namespace smp::pipeline
