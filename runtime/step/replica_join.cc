// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/replica_join.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/public_call.h"
#include "dp/replica_state.h"
#include "runtime/model.h"
#include "runtime/parameters/dividing.h"
#include "runtime/precision.h"
#include "runtime/step/loss_watch.h"
#include "runtime/step/step_program.h"
#include "runtime/step_functions.h"
#include "runtime/update/average.h"
#include "runtime/update/complete_gradients.h"
#include "runtime/update/update_watch.h"

namespace smp::runtime {

void ReplicaJoin::check_possible() const {
  const Config& config = runtime_.config();
  SMP_CHECK_WITH(UsageError,
                 !config.shard_optimizer_state() && config.sharded_data_parallel_degree() == 1,
                 "DistributedModel::join: with \"shard_optimizer_state\" and "
                 "\"sharded_data_parallel_degree\" each replica updates a part of the parameters, "
                 "which one without batches would not. Give all replicas as many batches "
                 "(drop_last)");
  SMP_CHECK_WITH(UsageError, !half_type(config) && !scales_loss(runtime_),
                 "DistributedModel::join: a replica without batches takes no part in the updates, "
                 "so it would lose the master weights of \"fp16\" and \"bf16\" and the loss scale. "
                 "Give all replicas as many batches (drop_last)");
}

ReplicaJoin::Step ReplicaJoin::begin_step(const std::shared_ptr<StepProgram>& program,
                                          const std::string& step_name) {
  const auto function = static_cast<int64_t>(stream_of(step_name));
  trained_[function] = {step_name, program};
  return step_of(begin_round(/*reduces=*/true, /*broadcasts=*/true, function));
}

ReplicaJoin::Step ReplicaJoin::step_of(const Round& round) const {
  return {divisor(round), round.first_active, round.active == replicas().size()};
}

void ReplicaJoin::end_join() {
  // The others are in steps.
  const core::PublicCallScope here(
      core::PublicCall("the end of DistributedModel::join", core::kAnyStep));
  try {
    const OwnUse parameters(runtime_);
    SMP_CHECK_WITH(UsageError, replicas().size() == 1 || !trained_.empty(),
                   "DistributedModel::join: this replica has no step function that has trained, so "
                   "it cannot take part in the steps of the others. Give each replica at least one "
                   "batch");
    Joinable::end_join();
    // They are sums of steps of others.
    if (!std::exchange(took_part_, false)) return;
    for (const auto& model : runtime_.models()) zero_grad(*model);
  } catch (const std::exception& error) {
    runtime_.fail(error);
    throw;
  }
}

void ReplicaJoin::take_part(const Round& round) {
  took_part_ = true;
  const Trained& trained = trained_[round.kind];
  const auto program = trained.program.lock();
  SMP_CHECK_WITH(UsageError, program != nullptr,
                 "DistributedModel::join: this replica has not trained with the step function that "
                 "others call, so it cannot take part in their steps. Call each step "
                 "function at least once on each replica, and keep it until the join ends");
  program->take_part(step_of(round), trained.step_name);
}

void ReplicaJoin::take_model_of(int root) {
  std::vector<at::Tensor> tensors;
  for (const auto& entry : runtime_.table().entries()) {
    if (runtime_.owns(entry)) tensors.push_back(entry.tensor.detach());
  }
  dp::broadcast_in_chunks(std::move(tensors), runtime_.replicas(), root);
  for (const auto& model : runtime_.models()) {
    for (Average* average : model->averages) average->take_of(runtime_.replicas(), root);
  }
  take_counts_of(root);
}

/// Takes the counts that are compared between replicas, are saved, or key random numbers.
void ReplicaJoin::take_counts_of(int root) {
  Progress& progress = runtime_.progress;
  const nlohmann::json mine = {{"training_steps", progress.training_steps},
                               {"updates", runtime_.update_watch->updates()},
                               {"calls", progress.step_functions.all()}};
  const auto counts = nlohmann::json::parse(comm::broadcast_bytes(replicas(), mine.dump(), root));
  progress.training_steps = counts.at("training_steps").get<int64_t>();
  progress.step_functions.load(counts.at("calls").get<StepFunctions::Calls>());
  runtime_.update_watch->set_updates(counts.at("updates").get<int64_t>());
}

}  // namespace smp::runtime
