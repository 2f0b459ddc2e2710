// SPDX-License-Identifier: Apache-2.0
#include "runtime/save/written_shard.h"

#include <iterator>
#include <utility>

#include "checkpoint/apply.h"
#include "runtime/parameters/dividing.h"
#include "runtime/parameters/whole.h"
#include "runtime/save/program_tensors.h"
#include "runtime/update/average.h"
#include "runtime/update/divided_states.h"
#include "runtime/update/optimizer.h"

namespace smp::runtime {
namespace {

using checkpoint::NamedTensor;

/// Adds this rank's part of the written states, by parameter.
void add_tensors(const Runtime& runtime, const Turns& turns, const StateFields& fields,
                 OptimizerState& state, checkpoint::Shard& shard) {
  turns.keep_mine(state);
  join_states(runtime, fields, runtime.topology().axis(CommGroup::kTp), state);
  shard.optimizer_tensors.merge(optim::tensors_of(state));
}

/// Adds this rank's part of the states of optimizers, as that of one with the groups of all.
void add_optimizers(const Runtime& runtime, const Turns& turns,
                    const std::vector<Optimizer*>& optimizers, checkpoint::Shard& shard) {
  OptimizerState all;
  for (Optimizer* optimizer : optimizers) {
    OptimizerState state = optimizer->local_state();
    add_tensors(runtime, turns, optimizer->fields(), state, shard);
    all.params.merge(std::move(state.params));
    std::move(state.groups.begin(), state.groups.end(), std::back_inserter(all.groups));
  }
  shard.optimizer = optim::to_json(all);
}

}  // namespace

Turns::Turns(const Runtime& runtime, const std::vector<Model*>& models, checkpoint::Medium medium)
    : are_taken_(medium == checkpoint::Medium::kMemory && runtime.partitioned() &&
                 !runtime.parameter_shards() && !runtime.shards_optimizer_state()),
      replica_(runtime.replicas()->rank()) {
  if (!are_taken_) return;
  uint64_t total = 0, begin = 0;
  std::vector<std::pair<std::string, uint64_t>> parameters;
  for (const NamedTensor& tensor : tensors_of(runtime.table(), models)) {
    const auto& entry = runtime.table().at(tensor.name);
    if (!entry.is_parameter() || !runtime.owns(entry)) continue;
    parameters.emplace_back(tensor.name, entry.tensor.nbytes());
    total += entry.tensor.nbytes();
  }
  for (const auto& [name, bytes] : parameters) {
    const auto replicas = runtime.replicas()->size();
    replica_of_[name] = static_cast<int>(checkpoint::share_of(begin, total, replicas));
    begin += bytes;
  }
}

int Turns::of(const std::string& name) const {
  const auto found = replica_of_.find(name);
  return found == replica_of_.end() ? 0 : found->second;
}

void Turns::keep_mine(OptimizerState& state) const {
  if (!are_taken_) return;
  optim::erase_params(state, [&](const std::string& name) { return of(name) != replica_; });
}

Writers::Writers(const Runtime& runtime, const Turns& turns, bool writes_states) {
  const int stages = runtime.group(CommGroup::kPp)->size();
  const int parts = runtime.table().any_divided() ? runtime.topology().tp_size() : 1;
  const bool all = turns.are_taken() || (writes_states && runtime.shards_optimizer_state());
  int replicas = all ? runtime.replicas()->size() : 1;
  if (runtime.parameter_shards()) replicas = runtime.topology().pieces().size;
  count = (runtime.partitioned() ? stages * replicas : 1) * parts;
  const int place = runtime.replicas()->rank() * stages + runtime.rank_in(CommGroup::kPp);
  const int part = runtime.rank_in(CommGroup::kTp);
  mine = part < parts ? place * parts + part : count;
}

checkpoint::Shard shard_of(const Runtime& runtime, const CheckpointParts& parts,
                           const Turns& turns) {
  checkpoint::Shard shard;
  size_t turn = 0;
  for (auto& tensor : tensors_of(runtime.table(), parts.models())) {
    const auto& entry = runtime.table().at(tensor.name);
    tensor.tensor = whole_on_one(runtime, entry, turn++, turns.of(tensor.name));
    if (tensor.tensor.defined()) shard.model.push_back(std::move(tensor));
  }
  if (!parts.optimizers().empty()) add_optimizers(runtime, turns, parts.optimizers(), shard);
  for (Optimizer* optimizer : parts.optimizers()) {  // one of them scales the loss, or none
    const auto scale = optimizer->loss_scaling().state();
    if (!scale.empty()) shard.optimizer[kLossScale] = scale;
  }
  for (Average* average : averages_of(parts.models())) {
    auto state = average->local_state();
    add_tensors(runtime, turns, {}, state, shard);
    shard.optimizer[checkpoint::kAverages][average->name()] =
        static_cast<uint64_t>(average->updates());
  }
  for (const auto& tensors : program_tensors_of(*runtime.checkpoint_context, parts.models())) {
    auto state = tensors->local_state();
    // All replicas have them.
    if (!turns.are_taken() && runtime.replicas()->rank() > 0) state = {};
    add_tensors(runtime, turns, {}, state, shard);
  }
  return shard;
}

}  // namespace smp::runtime
