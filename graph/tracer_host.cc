// SPDX-License-Identifier: Apache-2.0
// The part of Tracer that knows the tensors that host code can write: a factory's result, until an
// operator writes it, and small constants.

#include "graph/alias_analysis.h"
#include "graph/capture.h"
#include "graph/content.h"
#include "graph/guard.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"
#include "graph/tracer.h"
#include "graph/visit.h"

namespace smp::graph {

bool Tracer::HostData::changed() const { return hash_content(tensor) != content; }

/// Whether an operator that is about to use it for the first time finds the numbers that host code
/// put there.
bool Tracer::HostData::filled(bool for_read) const {
  return !is_read && ((for_read && uninitialised) || changed());
}

/// From now on host code may fill the factory's result. The result of `empty` is marked first, so
/// that it shows whether it was filled, even with the old content of the memory.
void Tracer::note_factory(ValueId id, const c10::OperatorHandle& op, const at::Tensor& result) {
  if (options_.wholes != nullptr) options_.wholes->add(result.storage());
  const bool empty = has_trait(op.schema().name(), OperatorTrait::kLeavesUninitialised);
  if (empty) mark_uninitialised(result);
  host_data_[value(id).alias_set] = {id, result.variable_data(), hash_content(result), empty};
}

/// An operator has read the constant. A large one is looked at once in a run.
void Tracer::note_constant(ValueId id, const at::Tensor& tensor) {
  if (!is_small_on_cpu(TensorMeta::of(tensor))) return;
  host_data_[value(id).alias_set] = {id, tensor, hash_content(tensor), false, /*is_read=*/true};
}

/// Takes memory that host code filled for a literal: an operator reads it, or writes it and may
/// leave parts as they are.
void Tracer::settle(HostData& data, bool for_read) {
  if (data.is_read) {
    // A large one is looked at when it is written, or at the end.
    if (!for_read || is_small_on_cpu(TensorMeta::of(data.tensor))) check_unchanged(data);
    return;
  }
  if (guard_ != nullptr) {
    guard_->note_literal(data.id, data.tensor);
  } else if (data.filled(for_read)) {
    capture_->make_literal(data.id, data.tensor);
  }
  if (!for_read) return;
  data.content = hash_content(data.tensor);
  data.is_read = true;
}

void Tracer::check_unchanged(const HostData& data) const {
  if (!data.changed()) return;
  refuse(c10::str("changes the data of a tensor of shape ", data.tensor.sizes(),
                  " on the host after an operator has read it"),
         "A tensor that host code fills has one content in a run: make another tensor for other "
         "data (torch::tensor(vector), clone())");
}

void Tracer::settle_written(const Operator& op) {
  for (int alias_set : op.writes) {
    const auto it = host_data_.find(alias_set);
    if (it == host_data_.end()) continue;
    settle(it->second, /*for_read=*/false);
    withhold(alias_set);
  }
}

/// An operator writes memory that host code could fill until now: from here on it holds the data of
/// this run, which the function does not see.
void Tracer::withhold(int alias_set) {
  const auto it = host_data_.find(alias_set);
  const HostData& data = it->second;
  if (options_.execute) {
    capture_->move_data(alias_set, *data.tensor.storage().unsafeGetStorageImpl());
  }
  become_placeholder(data.tensor, options_.step_name);
  if (capture_ != nullptr) capture_->set_user(data.id, data.tensor);
  host_data_.erase(it);
}

/// Returning the memory itself, or a view of it, is not reading it.
void Tracer::settle_read(const TracedCall& call, const Operator& op) {
  if (host_data_.empty()) return;
  const Graph& graph = guard_ != nullptr ? guard_->graph() : capture_->graph();
  for (ValueId argument : call.ids) {
    if (argument != kUndefined && !has_result_on(graph, op, value(argument).alias_set)) {
      settle_read(argument);
    }
  }
}

void Tracer::settle_read(ValueId id) {
  const auto it = host_data_.find(value(id).alias_set);
  if (it != host_data_.end()) settle(it->second, /*for_read=*/true);
}

/// Whether the operator has returned a view of a factory's result, which host code may yet fill.
bool Tracer::views_unread_host_data(const Operator& op) const {
  if (host_may_write(op.handle)) return false;  // the factory: a filled result is not run again
  return any_result(capture_->graph(), op, [&](const Value& result) {
    const auto it = host_data_.find(result.alias_set);
    return it != host_data_.end() && !it->second.is_read;
  });
}

/// A factory's result that the operator is the first to use, and that host code has filled before,
/// unlike when the graph was captured.
std::optional<ValueId> Tracer::filled_by_host(const Graph& graph, const TracedCall& call,
                                              const Operator& op) const {
  if (host_data_.empty()) return std::nullopt;
  const auto find = [&](int alias_set, bool for_read) -> std::optional<ValueId> {
    const auto it = host_data_.find(alias_set);
    if (it == host_data_.end()) return std::nullopt;
    const ValueId id = it->second.id;
    const bool known = graph.values[id].kind == ValueKind::kLiteral;
    return known || !it->second.filled(for_read) ? std::nullopt : std::optional(id);
  };
  for (int alias_set : op.writes) {
    if (const auto filled = find(alias_set, false)) return filled;
  }
  for (ValueId id : call.ids) {
    if (id == kUndefined || has_result_on(graph, op, value(id).alias_set)) continue;
    if (const auto filled = find(value(id).alias_set, true)) return filled;
  }
  return std::nullopt;
}

/// The same for a tensor that the function returns or gives as a gradient.
void Tracer::settle_end(ValueId id) {
  if (id == kUndefined) return;
  const auto it = host_data_.find(value(id).alias_set);
  if (it == host_data_.end()) return;
  if (guard_ != nullptr && it->second.filled(/*for_read=*/true)) {
    const ValueId filled = it->second.id;
    if (!guard_->leave_unless_literal(filled)) {
      start_capture(c10::str("host code has filled %", filled));
    }
  }
  settle_read(id);
}

}  // namespace smp::graph
