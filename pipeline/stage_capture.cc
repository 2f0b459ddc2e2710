// SPDX-License-Identifier: Apache-2.0
// Whether and how a stage's computations are captured as graphs of a device.

#include <c10/util/StringUtil.h>

#include "graph/visit.h"
#include "pipeline/stage.h"

namespace smp::pipeline {

using graph::ValueId;
using graph::ValueKind;

bool Stage::is_foreign(const graph::Operator& op) { return op.name().rfind("aten::", 0) != 0; }

std::string Stage::why_not_captured() const {
  if (residency_) return "parameters are divided (\"sharded_data_parallel_degree\")";
  if (store_) return "activations are offloaded (\"offload_activations\")";
  const auto is_of_host = [this](ValueId id) {
    const graph::Value& value = graph_.values[id];
    const bool is_constant =
        value.kind == ValueKind::kConstant || value.kind == ValueKind::kLiteral;
    return value.meta.device.is_cpu() && !is_constant;
  };
  for (int index : operators_) {
    const graph::Operator& op = graph_.operators[index];
    const auto text = [&] {
      return c10::str("operator ", index, " (", op.name(), ")",
                      op.scope.empty() ? "" : ", in module \"" + op.scope + "\"");
    };
    if (is_foreign(op)) {
      return text() + " may have the host do more than give the device work";
    }
    bool on_host = false;
    graph::for_each_argument(op, [&](ValueId id) { on_host |= is_of_host(id); });
    if (!graph_.makes_literal(op)) {
      graph::for_each_result(op, [&](ValueId id) { on_host |= is_of_host(id); });
    }
    if (on_host) return text() + " computes on the CPU";
  }
  return "";
}

std::vector<const void*> Stage::addresses() const {
  std::vector<const void*> addresses;
  for (const Parameter& parameter : parameters_) {
    addresses.push_back(parameter.tensor.const_data_ptr());
  }
  return addresses;
}

std::vector<int> Stage::random_ordinals() const {
  std::vector<int> ordinals;
  for (int index : operators_) {
    const int ordinal = graph_.operators[index].random_ordinal;
    if (ordinal >= 0) ordinals.push_back(ordinal);
  }
  return ordinals;
}

void Stage::forget_leaves() {
  for (Parameter& parameter : parameters_) parameter.spare.clear();
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

}  // namespace smp::pipeline
