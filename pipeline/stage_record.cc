// SPDX-License-Identifier: Apache-2.0
#include "pipeline/stage_record.h"

#include <utility>

#include "core/check.h"
#include "graph/content.h"
#include "graph/memory_layout.h"
#include "pipeline/stage.h"

// The part of `Stage` that records and repeats the work of a stage.
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

/// After `enter_all`, before the operators.
void Stage::record_given(const InFlight& state) const {
  if (state.record == nullptr || !state.record->keeps_given) return;
  auto& given = state.record->given;
  // Received tensors lie on memory that goes back to its sender.
  const auto stays = [this](ValueId id) {
    return program_.graph.values[id].kind != ValueKind::kResult && !program_.writes(id);
  };
  const auto give = [&](ValueId id) {
    const at::Tensor tensor = environment_[id].detach();
    given.push_back(stays(id) ? tensor : copied(tensor));
  };
  for (const auto& parameter : program_.parameters) give(parameter.value);
  for (const auto& input : program_.inputs) give(input.value);
  for (const auto& content : program_.contents) give(content.value);
  for (const auto& incoming : program_.incoming) {
    for (const Entry& entry : incoming.values) give(entry.value);
  }
}

/// Before `begin_backward` moves them.
void Stage::record_given_gradients(const InFlight& state) const {
  if (state.record == nullptr || !state.record->keeps_given) return;
  for (const auto& outgoing : program_.outgoing) {
    for (const at::Tensor& gradient : state.gradients[outgoing.place]) {
      state.record->given.push_back(copied(gradient));
    }
  }
}

graph::ResultObserver Stage::result_observer(const InFlight& state) const {
  if (state.record == nullptr) return nullptr;
  return [this, record = state.record](int index, size_t number, const at::Tensor& result) {
    if (!graph::computes(program_.graph, index, number)) return;
    record->hashes.push_back({Kind::kResult, index, static_cast<int64_t>(number), hash_of(result)});
  };
}

void Stage::record_buffers(const InFlight& state) const {
  if (state.record == nullptr) return;
  for (size_t i = 0; i < held_.size(); ++i) {
    const ValueId id = program_.parameters[i].value;
    if (!program_.writes(id)) continue;
    state.record->hashes.push_back({Kind::kBuffer, id, 0, hash_of(held_[i].tensor)});
  }
}

void Stage::record_gradient(ValueId parameter, const at::Tensor& gradient,
                            const InFlight& state) const {
  // Sums to which products have added themselves are missing in it.
  if (state.record == nullptr || state.fusion != nullptr) return;
  state.record->hashes.push_back({Kind::kParameterGradient, parameter, 0, hash_of(gradient)});
}

/// After `keep_gradients`.
void Stage::record_gradients(const InFlight& state) const {
  if (state.record == nullptr) return;
  for (const auto& incoming : program_.incoming) {
    const Edge& edge = program_.edges[program_.own_edges[incoming.place]];
    const std::vector<ValueId> values = edge.returning();
    const Message& returning = state.gradients[incoming.place];
    for (size_t i = 0; i < values.size(); ++i) {
      state.record->hashes.push_back(
          {Kind::kGradient, values[i], edge.from, hash_of(returning[i])});
    }
  }
}

/// The microbatch is done.
void Stage::finish(InFlight& state) {
  for (size_t i = 0; i < state.leaves.size(); ++i) {
    Leaf& leaf = state.leaves[i];
    if (leaf.sink == nullptr) continue;
    leaf.sink->gradient.reset();
    leaf.sink->take = nullptr;
    held_[i].spare.push_back(std::move(leaf));
  }
  state.forget();
}

void Stage::run_again(const std::vector<at::Tensor>& given, const graph::RandomKey& key,
                      StageRecord& record) {
  InFlight& state = in_flight_.front();
  auto next = given.begin();
  const auto own = [&](ValueId id) {
    return program_.writes(id) ? copied(*next++) : next++->detach();
  };
  for (size_t i = 0; i < held_.size(); ++i) {
    const ValueId id = program_.parameters[i].value;
    held_[i].tensor = own(id);
    held_[i].tensor.set_requires_grad(program_.graph.values[id].meta.requires_grad);
  }
  std::vector<at::Tensor> inputs(program_.graph.inputs.size());
  for (const auto& input : program_.inputs) inputs[input.position] = *next++;
  for (size_t i = 0; i < contents_.size(); ++i) {
    contents_[i] = next++->detach();
    // A message carries neither wide gaps nor that it is a number.
    const at::Tensor& recorded = program_.graph.values[program_.contents[i].value].content;
    if (graph::same_content(recorded, contents_[i])) {
      contents_[i] = recorded;
    } else if (recorded.unsafeGetTensorImpl()->is_wrapped_number()) {
      contents_[i].unsafeGetTensorImpl()->set_wrapped_number(true);
    }
  }
  for (const auto& incoming : program_.incoming) {
    Message& values = state.values[incoming.place];
    for (const Entry& entry : incoming.values) values.push_back(own(entry.value));
  }
  this->record(0, &record);
  StepResults results;
  forward(0, inputs, key, results);
  for (const auto& outgoing : program_.outgoing) state.values[outgoing.place].clear();
  if (program_.has_backward) {
    for (const auto& outgoing : program_.outgoing) {
      const auto count = static_cast<int64_t>(outgoing.gradients.size() + outgoing.replicas.size());
      state.gradients[outgoing.place].assign(next, next + count);
      next += count;
    }
    backward(0, /*sums=*/nullptr);
    for (const auto& incoming : program_.incoming) state.gradients[incoming.place].clear();
  }
  SMP_INTERNAL_ASSERT(next == given.end(), "stage ", program_.index, " was given ", given.size(),
                      " tensors to run again from, and reads ", next - given.begin());
  for (Held& held : held_) held = {};
  for (at::Tensor& content : contents_) content.reset();
}

}  // namespace smp::pipeline
