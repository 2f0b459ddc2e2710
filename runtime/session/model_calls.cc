// SPDX-License-Identifier: Apache-2.0
#include "runtime/session/model_calls.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <unordered_set>
#include <utility>

#include "checkpoint/apply.h"
#include "comm/communicator.h"
#include "core/check.h"
#include "dp/parameter_pieces.h"
#include "graph/absent.h"
#include "graph/tracer.h"
#include "runtime/first_difference.h"
#include "runtime/parameters/delayed.h"
#include "runtime/parameters/dividing.h"
#include "runtime/parameters/parameter_shards.h"
#include "runtime/parameters/storage.h"
#include "runtime/parameters/whole.h"
#include "runtime/save/loading.h"
#include "runtime/step/agreement.h"
#include "runtime/step/replica_join.h"
#include "runtime/update/average.h"
#include "runtime/update/loss_scaler.h"

namespace smp::runtime {
namespace {

/// The tensors of the model that this rank holds, by name: of divided ones its part or shard.
Model::TensorDict held_by(const Model& model) {
  const Runtime& runtime = model.runtime();
  Model::TensorDict result;
  for (const auto& dict : {model.local_named_parameters(), model.local_named_buffers()}) {
    for (const auto& item : dict) {
      const auto shard = runtime.table().at(item.value()).shard();
      result.insert(item.key(),
                    shard ? runtime.parameter_shards()->parameters()->shard(*shard) : item.value());
    }
  }
  return result;
}

/// The misfits, one line each: names, sizes (`sizes` says which are expected) and types.
std::string misfits(const Model& model, const Model::TensorDict& own,
                    const Model::TensorDict& given, bool strict,
                    const std::function<std::vector<int64_t>(const at::Tensor&)>& sizes) {
  const auto fits = [&](const at::Tensor& value, const at::Tensor& held) {
    if (model.half() && value.is_floating_point() && held.is_floating_point()) return true;
    return value.scalar_type() == held.scalar_type();
  };
  std::string problems;
  for (const auto& item : own) {
    const at::Tensor* value = given.find(item.key());
    if (value == nullptr) {
      if (strict) problems += "\n  missing: " + item.key();
      continue;
    }
    const auto expected = sizes(item.value());
    if (value->sizes() != at::IntArrayRef(expected) || !fits(*value, item.value())) {
      problems +=
          c10::str("\n  ", item.key(), ": expected ", item.value().scalar_type(),
                   at::IntArrayRef(expected), ", got ", value->scalar_type(), value->sizes());
    }
  }
  for (const auto& item : given) {
    if (strict && !own.contains(item.key())) problems += "\n  unexpected: " + item.key();
  }
  return problems;
}

void gather_from_owners(const Model& model) {
  const Runtime& runtime = model.runtime();
  at::NoGradGuard no_grad;
  const auto pipeline = runtime.group(CommGroup::kPp);
  if (runtime.parameter_shards()) {
    runtime.parameter_shards()->parameters()->take_back();  // tensors that an earlier call gathered
    runtime.parameter_shards()->parameters()->lend();
  }
  for (const auto& tensors : {model.parameters(), model.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      const int root = *runtime.table().at(tensor).owner();
      allocate_data(tensor);
      graph::become_present(tensor);
      const at::Tensor copy = tensor.detach().cpu().contiguous();
      pipeline->broadcast(copy, root);
      if (!copy.is_alias_of(tensor)) tensor.detach().copy_(copy);
    }
  }
}

void check_same_inputs(comm::Communicator& group, const std::vector<at::Tensor>& inputs) {
  const auto all = comm::all_gather_bytes(group, std::to_string(hash_inputs(inputs)));
  const size_t other = first_other(all);
  SMP_CHECK_WITH(UsageError, other == 0,
                 "a DistributedModel was called outside a step function with other tensors on tp "
                 "rank ",
                 other,
                 " than on tp rank 0. Its layers are divided among the ranks of a "
                 "tensor-parallel group, which work on one batch together: give all of them the "
                 "same");
}

}  // namespace

void backward(const Model& model, const std::vector<at::Tensor>& tensors,
              const std::vector<at::Tensor>& gradients) {
  graph::Tracer* tracer = graph::Tracer::current();
  SMP_CHECK_WITH(UsageError, tracer != nullptr,
                 "model->backward was called outside a step function. Call it inside: auto train = "
                 "smp::step([&](torch::Tensor x) { ...; model->backward(loss); return loss; })");
  const auto scaler = model.runtime().step_inputs.loss_scaler.lock();
  tracer->backward(scaler ? scaler->scale(tensors, gradients.empty()) : tensors, gradients);
}

Model::TensorDict virtual_named_parameters(const Model& model) {
  Runtime& runtime = model.runtime();
  const OwnUse parameters(runtime);
  for (const auto& pieces : pieces_of(runtime)) pieces->bind();
  Model::TensorDict result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : model.local_named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    const at::Tensor& tensor = runtime.table().at(item.value()).updated();
    if (tensor.defined()) result.insert(item.key(), tensor);
  }
  return result;
}

Join join_replicas(const Model& model, const JoinOptions& options) {
  Runtime& runtime = model.runtime();
  const OwnUse parameters = begin_outside_step(runtime, "join");
  if (options.enable()) runtime.replica_join->check_possible();
  return Join(runtime.replica_join, options);
}

Model::TensorDict state_dict(const Model& model, bool gather_to_rank0) {
  Runtime& runtime = model.runtime();
  const OwnUse parameters = begin_outside_step(runtime, "state_dict");
  check_pieces_unwritten(runtime);
  std::map<const c10::TensorImpl*, at::Tensor> copies;
  Model::TensorDict result;
  for (const auto& dict : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& item : dict) {
      const auto [place, is_new] = copies.try_emplace(item.value().unsafeGetTensorImpl());
      at::Tensor& copy = place->second;
      if (is_new) copy = whole_copy(runtime, runtime.table().at(item.value()), gather_to_rank0);
      if (copy.defined()) result.insert(item.key(), copy);
    }
  }
  return result;
}

Model::TensorDict local_state_dict(const Model& model) {
  const OwnUse parameters(model.runtime());
  check_pieces_unwritten(model.runtime());
  const at::NoGradGuard no_grad;
  Model::TensorDict result;
  for (const auto& item : held_by(model)) result.insert(item.key(), item.value().detach().clone());
  return result;
}

void load_state_dict(Model& model, const Model::TensorDict& state, bool strict) {
  Runtime& runtime = model.runtime();
  const OwnUse parameters = begin_outside_step(runtime, "load_state_dict");
  check_no_average_in_use(model, "load_state_dict");
  const Model::TensorDict own = checkpoint::state_dict(*model.module_ptr());
  const std::string problems = misfits(model, own, state, strict, [&](const at::Tensor& tensor) {
    return runtime.table().at(tensor).whole_sizes();
  });
  SMP_CHECK_WITH(
      CheckpointError, problems.empty(), "the state dictionary does not fit the model:", problems,
      "\nNothing was loaded. Pass strict = false to accept missing and unexpected names");
  at::NoGradGuard no_grad;
  ++runtime.progress.parameter_loads;
  for (const auto& item : own) {
    const at::Tensor* given = state.find(item.key());
    if (given == nullptr) continue;
    assign(runtime.table().at(item.value()), runtime.rank(),
           [given = *given, version = given->_version()] {
             SMP_CHECK_WITH(UsageError, given._version() == version,
                            "load_state_dict: a tensor that was given for a delayed parameter has "
                            "changed before the first step, which needs it. Give a copy");
             return given;
           });
  }
}

void load_local_state_dict(Model& model, const Model::TensorDict& state, bool strict) {
  Runtime& runtime = model.runtime();
  if (!model.partitioned()) {
    // It runs once.
    model.register_post_partition_hook(
        [&model, state, strict] { load_local_state_dict(model, state, strict); });
    return;
  }
  const OwnUse parameters = begin_outside_step(runtime, "load_state_dict");
  check_no_average_in_use(model, "load_state_dict");
  const Model::TensorDict own = held_by(model);
  const std::string problems = misfits(
      model, own, state, strict, [](const at::Tensor& tensor) { return tensor.sizes().vec(); });
  SMP_CHECK_WITH(CheckpointError, problems.empty(),
                 "the local state dictionary does not fit what this rank owns:", problems,
                 "\nNothing was loaded here. With same_partition_load, give each rank what its "
                 "local_state_dict() was, in a run with the same partition (partition_file, "
                 "load_partition); state_dict() fits any");
  const at::NoGradGuard no_grad;
  ++runtime.progress.parameter_loads;
  for (const auto& item : own) {
    const at::Tensor* given = state.find(item.key());
    if (given != nullptr) item.value().detach().copy_(*given);
  }
}

void gather_on_cpu(Model& model) {
  Runtime& runtime = model.runtime();
  const OwnUse parameters = begin_outside_step(runtime, "cpu");
  check_pieces_unwritten(runtime);
  check_no_average_in_use(model, "cpu");
  model.partitioned() ? gather_from_owners(model) : materialize(*model.module_ptr());
  runtime.lent = std::make_shared<LentWholes>(runtime);
  model.gathered = runtime.lent;
}

std::optional<uint64_t> begin_shared_call(Model& model, const std::vector<at::Tensor>& inputs) {
  const Runtime& runtime = model.runtime();
  if (runtime.lent && model.gathered.lock() == runtime.lent) return std::nullopt;
  const auto& entries = runtime.table().entries();
  const bool in_parts = std::any_of(entries.begin(), entries.end(),
                                    [](const auto& entry) { return entry.captured_whole; });
  const bool elsewhere =
      runtime.topology().pp_size() > 1 || runtime.config().sharded_data_parallel_degree() > 1;
  SMP_CHECK_WITH(UsageError, !in_parts && !elsewhere,
                 "a DistributedModel was called outside a step function: its parameters lie on "
                 "several ranks. Call it inside smp::step([&](torch::Tensor x) { return "
                 "model(x); }), or gather them by model->cpu()");
  if (!runtime.table().any_divided()) return std::nullopt;
  SMP_CHECK_WITH(UsageError, model.partitioned(),
                 "a DistributedModel whose layers are divided among the ranks of a tensor-parallel "
                 "group was called before the first step, which makes what they share alike. Run a "
                 "step function first");
  check_same_inputs(*runtime.group(CommGroup::kTp), inputs);
  return model.shared_calls++;
}

}  // namespace smp::runtime
