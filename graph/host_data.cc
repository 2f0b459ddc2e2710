// SPDX-License-Identifier: Apache-2.0
#include "graph/host_data.h"

#include "graph/alias_analysis.h"
#include "graph/content.h"
#include "graph/operator_traits.h"
#include "graph/shapes.h"
#include "graph/visit.h"

namespace smp::graph {
namespace {

bool is_small(const HostMemory& memory) { return is_small_on_cpu(TensorMeta::of(memory.tensor)); }

void check_unchanged(const HostMemory& memory, const Location& location) {
  if (!memory.changed()) return;
  location.refuse(c10::str("changes the data of a tensor of shape ", memory.tensor.sizes(),
                           " on the host after an operator has read it"),
                  "A tensor that host code fills has one content in a run: make another tensor for "
                  "other data (torch::tensor(vector), clone())");
}

/// An operator reads the memory, or writes it and may leave parts as they are.
void settle(HostMemory& memory, bool for_read, RunGraph& run, const Location& location) {
  if (memory.is_read) {
    // A large one is looked at when it is written, or at the end.
    if (!for_read || is_small(memory)) check_unchanged(memory, location);
    return;
  }
  run.settle(memory, for_read);
  if (!for_read) return;
  memory.content = hash_content(memory.tensor);
  memory.is_read = true;
}

}  // namespace

bool HostMemory::changed() const { return hash_content(tensor) != content; }

bool HostMemory::filled(bool for_read) const {
  return !is_read && ((for_read && uninitialised) || changed());
}

/// The result of `empty` is marked first, so that it shows whether it was filled, even with the old
/// content of the memory.
void HostData::add_factory(int alias_set, ValueId id, const c10::OperatorHandle& op,
                           const at::Tensor& result) {
  const bool empty = has_trait(op.schema().name(), OperatorTrait::kLeavesUninitialised);
  if (empty) mark_uninitialised(result);
  memories_[alias_set] = {id, result.variable_data(), hash_content(result), empty};
}

void HostData::add_constants(const std::vector<std::pair<ValueId, at::Tensor>>& constants,
                             const RunGraph& run) {
  for (const auto& [id, tensor] : constants) {
    if (!is_small_on_cpu(TensorMeta::of(tensor))) continue;
    memories_[run.value(id).alias_set] = {id, tensor, hash_content(tensor), false,
                                          /*is_read=*/true};
  }
}

const HostMemory* HostData::find(int alias_set) const {
  const auto it = memories_.find(alias_set);
  return it == memories_.end() ? nullptr : &it->second;
}

std::optional<ValueId> HostData::filled_unlike(const Graph& graph, const Operator& op,
                                               const TracedCall& call, const RunGraph& run) const {
  if (memories_.empty()) return std::nullopt;
  const auto is_filled = [&](const HostMemory* memory, bool for_read) {
    return memory != nullptr && graph.values[memory->id].kind != ValueKind::kLiteral &&
           memory->filled(for_read);
  };
  for (int alias_set : op.writes) {
    const HostMemory* memory = find(alias_set);
    if (is_filled(memory, /*for_read=*/false)) return memory->id;
  }
  for (ValueId id : call.ids) {
    const HostMemory* memory = id == kUndefined ? nullptr : find(run.value(id).alias_set);
    if (memory == nullptr || has_result_on(graph, op, run.value(id).alias_set)) continue;
    if (is_filled(memory, /*for_read=*/true)) return memory->id;
  }
  return std::nullopt;
}

bool HostData::has_unread_view(const Graph& graph, const Operator& op) const {
  if (host_may_write(op.handle)) return false;  // the factory: a filled result is not run again
  return any_result(graph, op, [&](const Value& result) {
    const HostMemory* memory = find(result.alias_set);
    return memory != nullptr && !memory->is_read;
  });
}

void HostData::settle_written(const Operator& op, RunGraph& run, const Location& location) {
  for (int alias_set : op.writes) {
    const auto it = memories_.find(alias_set);
    if (it == memories_.end()) continue;
    HostMemory& memory = it->second;
    settle(memory, /*for_read=*/false, run, location);
    run.move_data(alias_set, *memory.tensor.storage().unsafeGetStorageImpl());
    become_placeholder(memory.tensor, location.step_name());
    run.set_user(memory.id, memory.tensor);
    memories_.erase(it);
  }
}

/// Returning the memory itself, or a view of it, is not reading it.
void HostData::settle_read(const Operator& op, const TracedCall& call, RunGraph& run,
                           const Location& location) {
  if (memories_.empty()) return;
  for (ValueId id : call.ids) {
    const auto it = id == kUndefined ? memories_.end() : memories_.find(run.value(id).alias_set);
    if (it == memories_.end() || has_result_on(run.graph(), op, it->first)) continue;
    settle(it->second, /*for_read=*/true, run, location);
  }
}

void HostData::settle_read(ValueId id, RunGraph& run, const Location& location) {
  const auto it = memories_.find(run.value(id).alias_set);
  if (it != memories_.end()) settle(it->second, /*for_read=*/true, run, location);
}

void HostData::check_large(const Location& location) const {
  for (const auto& [alias_set, memory] : memories_) {
    if (memory.is_read && !is_small(memory)) check_unchanged(memory, location);
  }
}

}  // namespace smp::graph
