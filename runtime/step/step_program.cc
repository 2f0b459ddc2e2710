// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/step_program.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "core/check.h"
#include "core/heap.h"
#include "dp/comm_errors.h"
#include "dp/parameter_slices.h"
#include "dp/replica_state.h"
#include "graph/below_autograd.h"
#include "graph/leaf.h"
#include "pipeline/message.h"
#include "runtime/model.h"
#include "runtime/parameters/foreign.h"
#include "runtime/parameters/parameter_shards.h"
#include "runtime/parameters/storage.h"
#include "runtime/step/microbatches.h"
#include "runtime/step/pipeline_choice.h"
#include "runtime/step/units.h"
#include "runtime/update/update_watch.h"

namespace smp::runtime {
namespace {

/// Tags of the channels come first; these are above any number of edges.
constexpr comm::Tag kReplicaTag = 1 << 19;

void check_still_trained(const dp::ParameterSlices& slices,
                         const std::vector<at::Tensor>& trained) {
  const auto& at_first = slices.parameters();
  const bool same = std::equal(trained.begin(), trained.end(), at_first.begin(), at_first.end(),
                               [](const auto& a, const auto& b) { return a.is_same(b); });
  SMP_CHECK_WITH(UsageError, same,
                 "with \"shard_optimizer_state\", the parameters that require a gradient are "
                 "divided among the replicas when the first step that trains begins, and others "
                 "require one now (",
                 at_first.size(), " then, ", trained.size(),
                 " now). Freeze parameters before the first step, or set "
                 "\"shard_optimizer_state\" to false");
}

}  // namespace

StepProgram::StepProgram(std::shared_ptr<Runtime> runtime, PlannedGraph planned,
                         int64_t microbatches, bool settled, int64_t coalesced)
    : runtime_(std::move(runtime)),
      graph_(std::move(planned.graph)),
      plan_(std::move(planned.plan)),
      microbatches_(microbatches),
      coalesced_(coalesced),
      pipeline_(runtime_->group(CommGroup::kPp)),
      foreign_gradients_(foreign_gradients(*runtime_, *graph_)) {
  core::return_scratch_memory();  // memory of the sizes that other programs compute with
  const Config& config = runtime_->config();
  const int ranks = pipeline_->size();
  const auto model =
      step_model(*runtime_, static_cast<int>(microbatches_)).largest_region(planned.largest_region);
  auto step =
      plan_step(config, runtime_->first_step.schedule, *graph_, plan_, ranks, model, settled);
  if (const ParameterShards* sharding = runtime_->parameter_shards()) {
    divide_into_units(config, *sharding, *graph_, planned.regions, model, plan_, step);
  }
  find_copies();
  if (runtime_->parameter_shards()) {
    const auto& divided = runtime_->parameter_shards()->parameters()->parameters();
    absent_.insert(absent_.end(), divided.begin(), divided.end());
  }
  const graph::UnseenScope present(absent_);
  runner_ = std::make_unique<ScheduleRunner>(*runtime_, *graph_, plan_, std::move(planned.regions),
                                             std::move(step));
  make_records(*planned.captured);
}

void StepProgram::make_records(const graph::Graph& captured) {
  const Config& config = runtime_->config();
  const bool checks = config.replay_check() > 0 && graph_->trains();
  if (!checks && !config.record_hashes()) return;
  const auto rows = std::make_shared<const RecordedRows>(captured, graph_, plan_.order);
  if (config.record_hashes()) {
    hashed_ = rows;
    auto& log = runtime_->execution.hash_log;
    if (log == nullptr) {
      log = std::make_shared<graph::HashLogWriter>(*config.record_hashes(), runtime_->rank(),
                                                   runtime_->topology().size());
    }
  }
  if (!checks) return;
  replay_check_ = std::make_unique<ReplayCheck>(*runtime_, *graph_, plan_, runner_->edges(),
                                                static_cast<int>(microbatches_), rows);
}

/// Stages of one rank share one copy, and the owner's stages the owner's tensor.
void StepProgram::find_copies() {
  for (const auto& replica : plan_.replicas) {
    const Copy copy{replica.value, plan_.rank_of_stage[replica.owner],
                    plan_.rank_of_stage[replica.stage]};
    const bool known = std::any_of(copies_.begin(), copies_.end(), [&](const Copy& other) {
      return other.value == copy.value && other.to == copy.to;
    });
    if (copy.from == copy.to || known) continue;
    copies_.push_back(copy);
    if (copy.to != pipeline_->rank()) continue;
    absent_.push_back(runtime_->table().at(graph_->values[copy.value].name).tensor);
    allocate_data(absent_.back());
  }
}

/// Makes the sums of gradients, anew when a checkpoint with other gradient shards was loaded.
void StepProgram::make_gradients() {
  const int shards = runtime_->gradient_shards();
  if (shards == shards_) return;
  shards_ = shards;
  const auto replicas = runtime_->replicas();
  std::map<std::string, graph::ValueId> id_of;
  for (size_t id = 0; id < graph_->values.size(); ++id) {
    const graph::Value& value = graph_->values[id];
    if (value.kind == graph::ValueKind::kParameter) {
      id_of[value.name] = static_cast<graph::ValueId>(id);
    }
  }
  whole_.clear();
  divisors_.clear();
  sharded_.clear();
  std::vector<pipeline::GradientSums::Place> places(graph_->values.size());
  for (const auto& model : runtime_->models()) {
    std::vector<at::Tensor> parameters;
    std::vector<graph::ValueId> own, divided;
    for (const at::Tensor& parameter : model->trained_parameters()) {
      const auto& entry = runtime_->table().at(parameter);
      const auto id = id_of.find(entry.name);
      const auto shard = entry.shard();
      if (id != id_of.end()) {
        places[id->second].index = shard.value_or(parameters.size());
        (shard ? divided : own).push_back(id->second);
      }
      if (!shard) parameters.push_back(parameter);
    }
    const auto& options = model->options();
    dp::BucketOptions bucket;
    bucket.bucket_bytes = model->bucket_bytes();
    bucket.microbatches = static_cast<int>(microbatches_);
    // A hook adds up the replicas' sums; none but them has a sum of its own.
    bucket.gradient_shards = model->has_comm_hook() ? replicas->size() : shards;
    bucket.divisor = options.average_grads_across_microbatches()
                         ? static_cast<double>(microbatches_ * coalesced_ * replicas->size())
                         : static_cast<double>(shards);
    bucket.overlapping = options.overlapping_allreduce();
    bucket.backward_passes = static_cast<int>(options.backward_passes_per_step());
    bucket.gradient_as_bucket_view = options.gradient_as_bucket_view();
    bucket.gradients_as_summed = model->half().has_value();
    const auto slices = model->slices();
    if (slices) check_still_trained(*slices, parameters);
    whole_.push_back(model->gradients(parameters, bucket));
    divisors_.push_back(bucket.divisor);
    for (graph::ValueId id : own) places[id].sums = places[id].whole = whole_.back().get();
    if (!runtime_->parameter_shards()) continue;
    sharded_.push_back(make_sharded_gradients(bucket, divided));
    for (graph::ValueId id : divided) places[id].sums = sharded_.back().get();
  }
  std::vector<dp::StepGradients*> all;
  for (const auto& gradients : sharded_) all.push_back(gradients.get());
  for (const auto& gradients : whole_) all.push_back(gradients.get());
  gradients_ =
      pipeline::GradientSums(std::move(all), std::move(places), static_cast<int>(microbatches_),
                             runtime_->config().gradient_accumulation_fusion());
}

std::unique_ptr<dp::ShardedGradients> StepProgram::make_sharded_gradients(
    const dp::BucketOptions& bucket, const std::vector<graph::ValueId>& parameters) const {
  const ParameterShards& sharding = *runtime_->parameter_shards();
  dp::ShardedGradientOptions options{bucket};
  options.overlapping = true;  // for their memory
  options.bucket_elements = runtime_->config().sdp_reduce_bucket_size();
  return std::make_unique<dp::ShardedGradients>(
      sharding.parameters(), gradient_order(*runtime_, *graph_, parameters), runtime_->replicas(),
      sharding.replication_group(), options);
}

void StepProgram::begin_training(const std::string& name) {
  SMP_CHECK_WITH(
      UsageError,
      runtime_->current_step.adding_up == nullptr || runtime_->current_step.adding_up == this,
      "with backward_passes_per_step, the steps whose gradients add up must run the "
      "same operators, but this one runs others than the one before. Call the same step "
      "function with inputs of the same shapes, or use one backward pass a step");
  make_gradients();
  begin_together(runtime_->replica_join->begin_step(shared_from_this(), name));
}

void StepProgram::begin_together(const ReplicaJoin::Step& step) {
  together_ = step;
  for (size_t i = 0; i < whole_.size(); ++i) {
    whole_[i]->set_microbatches(static_cast<int>(microbatches_), divisors_[i]);
    whole_[i]->set_counted_replicas(step.divisor);
  }
  broadcast_buffers(step.source);
}

void StepProgram::take_part(const ReplicaJoin::Step& step, const std::string& name) {
  begin_together(step);
  finish_training(name, {});
}

bool StepProgram::reads_input(size_t position) const {
  const auto& stages = runner_->stages();
  return std::any_of(stages.begin(), stages.end(), [&](const auto& stage) {
    return stage.second->program().reads_input(position);
  });
}

/// Gives the buffers of a replica to all, where models ask for it.
void StepProgram::broadcast_buffers(int source) {
  for (const auto& model : runtime_->models()) {
    if (!model->options().broadcast_buffers()) continue;
    std::vector<at::Tensor> buffers;
    for (const at::Tensor& buffer : model->buffers()) {
      if (runtime_->owns(runtime_->table().at(buffer))) buffers.push_back(buffer);
    }
    dp::TensorBroadcast(std::move(buffers), runtime_->replicas()).run(source);
  }
}

/// Notes when buckets are reduced, in a step that is recorded, and tells tests. The result says
/// when they are.
StepProgram::Reductions StepProgram::observe_reductions(bool records) {
  auto recorded = std::make_shared<std::vector<pipeline::ReductionRecord>>();
  const auto note = [recorded, test = runtime_->execution.on_reduction](const auto& event) {
    const int64_t now = pipeline::TimelineRecorder::now();
    if (!event.has_ended) recorded->push_back({now, now, event.bytes});
    recorded->back().end = now;
    if (test) test(event);
  };
  const bool notes = records && runtime_->replicas()->size() > 1;
  for (dp::StepGradients* gradients : gradients_.all()) {
    const bool looks = notes || runtime_->execution.on_reduction;
    gradients->observe(looks ? dp::ReductionObserver(note) : nullptr);
  }
  return recorded;
}

/// Reduces buckets that have not started, too. `pace` is this replica's, but for its updates.
void StepProgram::finish_training(const std::string& name, ReplicaPace pace) {
  for (dp::StepGradients* gradients : gradients_.all()) gradients->reduce();
  pace.updates = runtime_->update_watch->updates();
  PaceExchange exchange(*runtime_->replicas(), pace);
  if (replay_check_) replay_check_->finish();
  runtime_->current_step.adding_up = nullptr;
  std::vector<ReplicaPace> paces;
  const auto where = [&] {
    return c10::str(
        " [while replicas reduced the gradients of step function \"", name, "\", training step ",
        runtime_->progress.training_steps + 1,
        " of this rank: one that leaves out a step, or has fewer batches, ends before]");
  };
  dp::with_where_in_errors(where, [&] {
    for (dp::StepGradients* gradients : gradients_.all()) {
      gradients->finish();
      if (gradients->is_adding_up()) runtime_->current_step.adding_up = this;
    }
    paces = exchange.wait();
  });
  if (runtime_->current_step.adding_up == nullptr) runtime_->update_watch->give(foreign_gradients_);
  if (together_.is_complete) check_same_pace(paces, name);
  std::vector<int64_t> counts;
  for (const ReplicaPace& other : paces) counts.push_back(other.microbatches);
  check_same_microbatches(counts, name, "Gradients are divided by one number");
  if (pace.has_bad_loss == 0) return;
  std::vector<bool> bad_ones;
  for (const ReplicaPace& other : paces) bad_ones.push_back(other.has_bad_loss != 0);
  losses_.report(*runtime_, name, bad_ones);
}

/// A copy of a tensor for other ranks, gathered from its shards if it has some. Collective over the
/// ranks that have them together.
at::Tensor StepProgram::whole_copy(const ParameterTable::Entry& entry) const {
  const auto shard = entry.shard();
  if (!shard) return entry.tensor.detach().contiguous();
  dp::ShardedParameters& parameters = *runtime_->parameter_shards()->parameters();
  parameters.gather(*shard);
  parameters.wait(*shard);
  const at::Tensor copy = entry.tensor.detach().clone(at::MemoryFormat::Contiguous);
  parameters.release(*shard);
  return copy;
}

/// Parameters that an optimizer may have changed, and buffers that a step may have: from their
/// owners to the stages that read them too.
void StepProgram::refresh_replicas() {
  at::NoGradGuard no_grad;
  std::vector<WorkPtr> sends;
  std::vector<at::Tensor> copies;
  for (size_t i = 0; i < copies_.size(); ++i) {
    const Copy& copied = copies_[i];
    const graph::Value& value = graph_->values[copied.value];
    const auto& entry = runtime_->table().at(value.name);
    if (!entry.is_parameter() && !entry.is_written) continue;  // constant
    const at::Tensor& tensor = entry.tensor;
    const comm::Tag tag = kReplicaTag + static_cast<comm::Tag>(i);
    if (copied.from == pipeline_->rank()) {
      copies.push_back(whole_copy(entry));
      sends.push_back(pipeline_->isend(copies.back(), copied.to, tag));
    } else if (copied.to == pipeline_->rank()) {
      const at::Tensor copy = at::empty(tensor.sizes(), tensor.options());
      pipeline_->recv(copy, copied.from, tag);
      tensor.detach().copy_(copy);
    }
  }
  for (const auto& work : sends) work->wait();
}

/// Sees to it that the step is recorded as far as a record is wanted.
void StepProgram::begin_records(const Inputs& inputs, pipeline::Executor::Step& step) {
  if (!replay_check_ && !hashed_) return;
  records_.clear();
  step.records = &records_;
  if (replay_check_) {
    replay_check_->begin_step({inputs.name, step.keys, inputs.constants, together_.is_complete});
  }
  for (const auto& [stage, unused] : runner_->stages()) {
    for (int m = 0; m < static_cast<int>(microbatches_); ++m) {
      const bool is_watched = replay_check_ && replay_check_->watches(stage, m);
      if (!is_watched && !hashed_) continue;
      pipeline::StageRecord& record = records_[{stage, m}];
      if (!is_watched) continue;
      replay_check_->watch(record);
      step.observers.push_back(replay_check_.get());
    }
  }
}

/// Stages keep the overrides they were given, so values that an earlier step overrode and this one
/// does not are set back to the recorded ones.
void StepProgram::complete_overrides(Inputs& inputs) {
  for (const auto& list : inputs.constants) {
    for (const auto& change : list) {
      overridden_constants_.insert({change.operator_index, change.argument});
    }
  }
  for (const auto& list : inputs.contents) {
    for (const auto& change : list) overridden_contents_.insert(change.value);
  }
  for (auto& list : inputs.constants) {
    std::vector<graph::ConstantOverride> complete;
    for (const auto& [op, argument] : overridden_constants_) {
      complete.push_back({op, argument, graph_->operators[op].arguments[argument].constant});
    }
    complete.insert(complete.end(), list.begin(), list.end());
    list = std::move(complete);
  }
  for (auto& list : inputs.contents) {
    std::vector<graph::ContentOverride> complete;
    for (graph::ValueId id : overridden_contents_) {
      complete.push_back({id, graph_->values[id].content});
    }
    complete.insert(complete.end(), list.begin(), list.end());
    list = std::move(complete);
  }
}

StepProgram::Outputs StepProgram::run(Inputs inputs) {
  if (runtime_->parameter_shards()) runtime_->parameter_shards()->parameters()->take_back();
  if (graph_->trains() || runtime_->parameter_shards()) forget_copies(*runtime_);
  const graph::UnseenScope present(absent_);
  complete_overrides(inputs);
  if (graph_->trains()) begin_training(inputs.name);
  refresh_replicas();
  pipeline::Executor::Step step = operands(inputs);
  begin_records(inputs, step);
  const Reductions reductions = observe_reductions(runner_->begin_step());
  pipeline::StepResults results = runner_->run(std::move(step));
  if (hashed_) {
    hashed_->write(*runtime_->execution.hash_log, inputs.name, inputs.step_call, records_,
                   [this](int microbatch) { return global_microbatch(microbatch); });
  }
  if (graph_->trains()) {
    const int64_t of_batch = microbatches_ * coalesced_ / runtime_->batches();
    finish_training(inputs.name, {0, losses_.finish(results.losses), of_batch});
  }
  runner_->end_step(*reductions);
  Outputs outputs(graph_->outputs.size(), std::vector<at::Tensor>(microbatches_));
  for (auto& output : results.outputs) {
    outputs[output.position][output.microbatch] = std::move(output.value);
  }
  share_outputs(outputs, inputs.share_outputs);
  return outputs;
}

pipeline::Executor::Step StepProgram::operands(const Inputs& inputs) {
  pipeline::Executor::Step step;
  step.inputs = inputs.tensors;
  for (int64_t m = 0; m < microbatches_; ++m) {
    graph::RandomKey key;
    key.seed = *runtime_->progress.seed;
    key.step_function = inputs.random_stream;
    key.call = inputs.step_call;
    key.global_microbatch = global_microbatch(m);
    step.keys.push_back(key);
  }
  if (has_overrides()) {
    step.constants = inputs.constants;
    step.contents = inputs.contents;
  }
  if (graph_->trains()) step.gradients = &gradients_;
  step.keeps_history = !inputs.detach_outputs;
  step.keeps_losses = losses_.begin(*runtime_, inputs.step_call);
  step.why_no_device_graphs = why_no_device_graphs(inputs);
  return step;
}

/// A leaf's call is another one at each run, but no device graph holds a leaf.
bool StepProgram::changes_numbers() const {
  const auto is_number = [&](const std::pair<int, int>& overridden) {
    return !graph::is_leaf(graph_->operators[overridden.first].handle);
  };
  return !overridden_contents_.empty() ||
         std::any_of(overridden_constants_.begin(), overridden_constants_.end(), is_number);
}

/// See `Executor::Step`.
core::Refusal StepProgram::why_no_device_graphs(const Inputs& inputs) const {
  if (changes_numbers()) return "numbers that the step function uses change between its calls";
  if (replay_check_ || hashed_)
    return "computations are recorded (\"replay_check\", \"record_hashes\")";
  if (runtime_->config().gradient_accumulation_fusion())
    return "weights add up gradients themselves (\"gradient_accumulation_fusion\")";
  if (runtime_->parameter_shards())
    return "parameters are divided (\"sharded_data_parallel_degree\")";
  if (!inputs.detach_outputs) return "outputs keep their history (detach_outputs(false))";
  return std::nullopt;
}

/// The number, among the microbatches of all ranks, of one that this rank runs. With tensor
/// parallelism it runs those of its group, rank by rank, if each was given a batch.
uint64_t StepProgram::global_microbatch(int64_t microbatch) const {
  const int64_t each = microbatches_ / runtime_->batches();
  const core::Topology& topology = runtime_->topology();
  int64_t batch = runtime_->rank_in(CommGroup::kRdp);
  if (runtime_->batches() > 1) {
    const auto group = topology.members(CommGroup::kTp, runtime_->rank());
    batch = topology.dp_rank(group[microbatch / each]);
  }
  return static_cast<uint64_t>(batch * each + microbatch % each);
}

/// Sends each rank's outputs to all ranks of the pipeline, in one message per rank; or, unless it
/// is `all`, those of one element.
void StepProgram::share_outputs(Outputs& outputs, bool all) const {
  if (pipeline_->size() == 1) return;
  for (int rank = 0; rank < pipeline_->size(); ++rank) {
    std::vector<graph::TensorMeta> metas;
    std::vector<std::pair<size_t, size_t>> places;
    for (size_t position = 0; position < outputs.size(); ++position) {
      const graph::ValueId id = graph_->outputs[position];
      if (id == graph::kUndefined) continue;
      if (plan_.rank_of_stage[plan_.stage_of_output[position]] != rank) continue;
      const graph::TensorMeta& meta = graph_->values[id].meta;
      if (!all && meta.numel() > 1) continue;
      for (size_t m = 0; m < outputs[position].size(); ++m) {
        metas.push_back(meta);
        places.emplace_back(position, m);
      }
    }
    if (metas.empty()) continue;
    std::vector<at::Tensor> tensors;
    for (const auto& [position, m] : places) tensors.push_back(outputs[position][m]);
    tensors = broadcast_outputs(pipeline::MessageLayout(metas), std::move(tensors), rank);
    for (size_t i = 0; i < places.size(); ++i) {
      outputs[places[i].first][places[i].second] = tensors[i];
    }
  }
}

/// The tensors of a rank, on all ranks of the pipeline. Elements on devices stay there where
/// devices can send them.
std::vector<at::Tensor> StepProgram::broadcast_outputs(const pipeline::MessageLayout& layout,
                                                       std::vector<at::Tensor> tensors,
                                                       int rank) const {
  at::Tensor message, part;
  if (layout.device().is_cpu()) {
    message = layout.make_buffer();
  } else {
    message = at::empty({layout.header_bytes()}, at::kByte);
    part = at::empty({layout.nbytes() - layout.header_bytes()},
                     at::device(layout.device()).dtype(at::kByte));
  }
  const bool mine = rank == pipeline_->rank();
  if (mine) {
    const auto copied = layout.begin_pack(tensors, message, part);
    SMP_INTERNAL_ASSERT(!copied, "outputs are packed where they lie");
  }
  pipeline_->broadcast(message, rank);
  if (part.defined()) pipeline_->broadcast(part, rank);
  return mine ? std::move(tensors) : layout.unpack(message, part);
}

}  // namespace smp::runtime
