// SPDX-License-Identifier: Apache-2.0
#include "pipeline/stage_record.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "core/check.h"
#include "graph/content.h"
#include "graph/leaf.h"
#include "graph/replay.h"
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

/// Copies a tensor with its strides to memory of its own. One that has no memory stays so.
at::Tensor copied(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor._is_zerotensor()) return tensor;
  return graph::copy_to(tensor.device(), tensor.detach());
}

}  // namespace

std::vector<ValueId> Stage::given() const {
  std::vector<ValueId> values;
  for (const Parameter& parameter : parameters_) values.push_back(parameter.value);
  for (const Input& input : inputs_) values.push_back(input.value);
  for (const Content& content : contents_) values.push_back(content.value);
  for (const Incoming& incoming : incoming_) {
    for (const Entry& entry : incoming.values) values.push_back(entry.value);
  }
  if (!has_backward_) return values;
  for (const Outgoing& outgoing : outgoing_) {
    values.insert(values.end(), outgoing.gradients.begin(), outgoing.gradients.end());
    for (const Entry& replica : outgoing.replicas) values.push_back(replica.value);
  }
  return values;
}

std::string Stage::why_not_again() const {
  std::set<int> written;  // alias sets
  for (int index : operators_) {
    const graph::Operator& op = graph_.operators[index];
    if (graph::is_leaf(op.handle)) {
      return c10::str("operator ", index,
                      " is a leaf module, which computes with the parameters "
                      "of its rank");
    }
    written.insert(op.writes.begin(), op.writes.end());
  }
  const std::vector<ValueId> given = this->given();
  std::set<int> entered;  // those of them on which something lies that comes from outside
  for (ValueId id : std::set<ValueId>(given.begin(), given.end())) {
    const int alias_set = graph_.values[id].alias_set;
    const bool here =
        std::binary_search(operators_.begin(), operators_.end(), graph_.values[id].producer);
    if (here || written.count(alias_set) == 0 || entered.insert(alias_set).second) continue;
    return "it writes memory on which two tensors lie that come from outside";
  }
  return "";
}

/// After `enter_all`, before the operators.
void Stage::record_given(const InFlight& state) const {
  if (state.record == nullptr || !state.record->keeps_given) return;
  auto& given = state.record->given;
  // Received tensors lie on memory that goes back to its sender.
  const auto stays = [this](ValueId id) {
    return graph_.values[id].kind != ValueKind::kResult && !writes(id);
  };
  const auto give = [&](ValueId id) {
    const at::Tensor tensor = environment_[id].detach();
    given.push_back(stays(id) ? tensor : copied(tensor));
  };
  for (const Parameter& parameter : parameters_) give(parameter.value);
  for (const Input& input : inputs_) give(input.value);
  for (const Content& content : contents_) give(content.value);
  for (const Incoming& incoming : incoming_) {
    for (const Entry& entry : incoming.values) give(entry.value);
  }
}

/// Before `begin_backward` moves them.
void Stage::record_given_gradients(const InFlight& state) const {
  if (state.record == nullptr || !state.record->keeps_given) return;
  for (const Outgoing& outgoing : outgoing_) {
    for (const at::Tensor& gradient : state.gradients[outgoing.place]) {
      state.record->given.push_back(copied(gradient));
    }
  }
}

graph::ResultObserver Stage::result_observer(const InFlight& state) const {
  if (state.record == nullptr) return nullptr;
  return [this, record = state.record](int index, size_t number, const at::Tensor& result) {
    if (!graph::computes(graph_, index, number)) return;
    record->hashes.push_back({Kind::kResult, index, static_cast<int64_t>(number), hash_of(result)});
  };
}

void Stage::record_buffers(const InFlight& state) const {
  if (state.record == nullptr) return;
  for (const Parameter& parameter : parameters_) {
    if (!writes(parameter.value)) continue;
    state.record->hashes.push_back({Kind::kBuffer, parameter.value, 0, hash_of(parameter.tensor)});
  }
}

void Stage::give_gradient(ValueId parameter, int microbatch, const InFlight& state,
                          at::Tensor gradient, const GradientConsumer& consume) const {
  // Sums to which products have added themselves are missing in it.
  if (state.record != nullptr && state.fusion == nullptr) {
    state.record->hashes.push_back({Kind::kParameterGradient, parameter, 0, hash_of(gradient)});
  }
  consume(parameter, microbatch, std::move(gradient));
}

/// After `keep_gradients`.
void Stage::record_gradients(const InFlight& state) const {
  if (state.record == nullptr) return;
  for (const Incoming& incoming : incoming_) {
    const Edge& edge = edges_[own_edges_[incoming.place]];
    std::vector<ValueId> values = edge.gradients;
    values.insert(values.end(), edge.replicas.begin(), edge.replicas.end());
    const Message& returning = state.gradients[incoming.place];
    for (size_t i = 0; i < values.size(); ++i) {
      state.record->hashes.push_back(
          {Kind::kGradient, values[i], edge.from, hash_of(returning[i])});
    }
  }
}

/// The microbatch is done.
void Stage::finish(InFlight& state) {
  if (state.record != nullptr && state.record->complete) state.record->complete();
  for (size_t i = 0; i < state.leaves.size(); ++i) {
    Leaf& leaf = state.leaves[i];
    if (leaf.sink == nullptr) continue;
    leaf.sink->gradient.reset();
    leaf.sink->take = nullptr;
    parameters_[i].spare.push_back(std::move(leaf));
  }
  state.forget();
}

void Stage::run_again(const std::vector<at::Tensor>& given, const graph::RandomKey& key,
                      StageRecord& record) {
  InFlight& state = in_flight_.front();
  auto next = given.begin();
  const auto own = [&](ValueId id) { return writes(id) ? copied(*next++) : next++->detach(); };
  for (Parameter& parameter : parameters_) {
    parameter.tensor = own(parameter.value);
    parameter.tensor.set_requires_grad(graph_.values[parameter.value].meta.requires_grad);
  }
  std::vector<at::Tensor> inputs(graph_.inputs.size());
  for (const Input& input : inputs_) inputs[input.position] = *next++;
  for (Content& content : contents_) {
    content.tensor = next++->detach();
    // A message does not carry this property.
    const at::Tensor& recorded = graph_.values[content.value].content;
    if (recorded.unsafeGetTensorImpl()->is_wrapped_number()) {
      content.tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
  }
  for (const Incoming& incoming : incoming_) {
    Message& values = state.values[incoming.place];
    for (const Entry& entry : incoming.values) values.push_back(own(entry.value));
  }
  this->record(0, &record);
  forward(0, inputs, key, [](int, int, const at::Tensor&) {});
  for (const Outgoing& outgoing : outgoing_) state.values[outgoing.place].clear();
  if (has_backward_) {
    for (const Outgoing& outgoing : outgoing_) {
      const auto count = static_cast<int64_t>(outgoing.gradients.size() + outgoing.replicas.size());
      state.gradients[outgoing.place].assign(next, next + count);
      next += count;
    }
    backward(
        0, [](ValueId, int, const at::Tensor&) {}, nullptr);
    for (const Incoming& incoming : incoming_) state.gradients[incoming.place].clear();
  }
  SMP_INTERNAL_ASSERT(next == given.end(), "stage ", index_, " was given ", given.size(),
                      " tensors to run again from, and reads ", next - given.begin());
  for (Parameter& parameter : parameters_) {
    parameter.tensor.reset();
    parameter.spare.clear();
  }
  for (Content& content : contents_) content.tensor.reset();
}

}  // namespace smp::pipeline
