// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/divided_states.h"

#include <ATen/core/grad_mode.h>

#include <string>
#include <utility>

#include "core/check.h"
#include "runtime/first_difference.h"
#include "runtime/parameters/join_parts.h"
#include "runtime/update/state_pieces.h"

namespace smp::runtime {
namespace {

/// The properties that ranks must have alike: fields, types and numbers of each divided parameter's
/// state, a parameter a line.
std::string describe(const Runtime& runtime, const OptimizerState& state) {
  std::string text;
  for (const auto* entry : runtime.table().divided()) {
    const auto found = state.params.find(entry->name);
    if (found == state.params.end()) continue;
    text += c10::str("parameter \"", entry->name, "\": ", found->second.scalars);
    for (const auto& [field, tensor] : found->second.tensors) {
      text += c10::str(", ", field, " of ", tensor.scalar_type(), tensor.sizes());
    }
    text += "\n";
  }
  return text;
}

void check_alike(const Runtime& runtime, const OptimizerState& state) {
  const auto all = comm::all_gather_bytes(*runtime.group(CommGroup::kTp), describe(runtime, state));
  const size_t other = first_other(all);
  if (other == 0) return;
  const auto [a, b] = first_difference(all[0], all[other]);
  core::fail<UsageError>(
      "the optimizer's state differs between the ranks of a tensor-parallel group: tp rank 0 has ",
      a, ", tp rank ", other, " has ", b, ". Call optimizer.step() on all ranks alike");
}

/// Leaves undivided parameters to the first rank of the group.
void keep_divided(const Runtime& runtime, OptimizerState& state) {
  std::map<std::string, OptimizerState::Param> divided;
  for (const auto* entry : runtime.table().divided()) {
    if (auto node = state.params.extract(entry->name)) divided.insert(std::move(node));
  }
  state.params = std::move(divided);
  for (auto& group : state.groups) group.params.clear();
}

}  // namespace

void join_states_of_parts(const Runtime& runtime, OptimizerState& state, JoinOn on) {
  if (!runtime.table().any_divided()) return;
  at::NoGradGuard no_grad;
  comm::Communicator& group = *runtime.group(CommGroup::kTp);
  check_alike(runtime, state);
  if (on == JoinOn::kOne && group.rank() > 0) keep_divided(runtime, state);
  int next = 0;
  for (const auto* entry : runtime.table().divided()) {
    const auto found = state.params.find(entry->name);
    if (found == state.params.end()) continue;
    const int root = next++ % group.size();
    OptimizerState::Param& param = found->second;
    for (auto& [field, tensor] : param.tensors) {
      if (tensor.sizes() != entry->tensor.sizes()) continue;
      const at::Tensor part = tensor.cpu();  // where the device has no room for all wholes
      tensor = on == JoinOn::kAll ? join_on_all(group, *entry->split, part)
                                  : join_on(root, group, *entry->split, part);
    }
    param.shape = entry->split->sizes;
    if (on == JoinOn::kOne && group.rank() != root) state.params.erase(found);
  }
}

void cut_states_to_parts(const Runtime& runtime, OptimizerState& state) {
  at::NoGradGuard no_grad;
  const int rank = runtime.rank_in(CommGroup::kTp);
  for (const auto* entry : runtime.table().divided()) {
    const auto found = state.params.find(entry->name);
    if (found == state.params.end()) continue;
    OptimizerState::Param& param = found->second;
    for (auto& [field, tensor] : param.tensors) {
      if (tensor.sizes() == at::IntArrayRef(entry->split->sizes)) {
        tensor = entry->split->part(tensor, rank);
      }
    }
    param.shape = entry->split->local_sizes();
  }
}

}  // namespace smp::runtime
