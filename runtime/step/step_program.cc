// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/step_program.h"

#include <algorithm>

#include "core/check.h"
#include "core/heap.h"
#include "dp/comm_errors.h"
#include "dp/parameter_pieces.h"
#include "dp/replica_state.h"
#include "graph/below_autograd.h"
#include "graph/leaf.h"
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

void check_still_trained(const dp::ParameterPieces& pieces,
                         const std::vector<at::Tensor>& trained) {
  const auto& at_first = pieces.parameters();
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
                         int64_t microbatches, bool settled, const StepOptions& options,
                         int64_t coalesced)
    : runtime_(std::move(runtime)),
      graph_(std::move(planned.graph)),
      plan_(std::move(planned.plan)),
      microbatches_(microbatches),
      coalesced_(coalesced),
      keeps_history_(!options.detach_outputs()),
      foreign_gradients_(foreign_gradients(*runtime_, *graph_)) {
  core::return_scratch_memory();  // memory of the sizes that other programs compute with
  const Config& config = runtime_->config();
  const int ranks = runtime_->group(CommGroup::kPp)->size();
  const auto model = step_model(*runtime_, planned, static_cast<int>(microbatches_));
  auto step =
      plan_step(config, runtime_->first_step.schedule, *graph_, plan_, ranks, model, settled);
  if (runtime_->parameter_shards()) divide_into_units(*graph_, model, plan_, step);
  auto setup = executor_setup(std::move(planned.regions), step.schedule, options.share_outputs());
  allocate_copies(setup.copies);
  if (setup.sharded) {
    const auto& divided = setup.sharded->parameters();
    absent_.insert(absent_.end(), divided.begin(), divided.end());
  }
  const graph::UnseenScope present(absent_);
  runner_ = std::make_unique<ScheduleRunner>(*runtime_, *graph_, plan_, std::move(step),
                                             std::move(setup));
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
  replay_check_ = std::make_unique<ReplayCheck>(*runtime_, runner_->partitioned(),
                                                static_cast<int>(microbatches_), rows);
}

/// `shares_all`: ranks give each other outputs of several elements, too.
pipeline::Executor::Setup StepProgram::executor_setup(partitioner::Regions regions,
                                                      const pipeline::Schedule& schedule,
                                                      bool shares_all) {
  const Config& config = runtime_->config();
  pipeline::Executor::Setup setup{runtime_->table().tensors()};
  if (graph_->trains()) setup.gradients = &gradients_;
  setup.regions = std::move(regions);
  if (config.offload_activations() && !setup.regions.empty()) {
    setup.store = runtime_->activation_store();
  }
  if (const ParameterShards* shards = runtime_->parameter_shards()) {
    setup.sharded = shards->parameters();
    setup.shard_of_value = shards->shard_of_value(*runtime_, *graph_);
  }
  setup.copies = pipeline::copies_of(plan_);
  setup.outputs = pipeline::shared_outputs(*graph_, plan_, schedule.ranks(),
                                           schedule.microbatches(), shares_all);
  setup.uses_device_graphs = config.cuda_graphs() != "off";
  setup.requires_device_graphs = config.cuda_graphs() == "on";
  return setup;
}

/// Gives memory to this rank's copies of tensors that others own.
void StepProgram::allocate_copies(const std::vector<pipeline::Frame::Copy>& copies) {
  for (const pipeline::Frame::Copy& copy : copies) {
    if (plan_.rank_of_stage[copy.to] != runtime_->rank_in(CommGroup::kPp)) continue;
    for (const graph::ValueId id : copy.values) {
      absent_.push_back(runtime_->table().at(graph_->values[id].name).tensor);
      allocate_data(absent_.back());
    }
  }
}

/// The options of a model's buckets in this program.
dp::BucketOptions StepProgram::bucket_options(const Model& model) const {
  const auto& options = model.options();
  const int replicas = runtime_->replicas()->size();
  dp::BucketOptions bucket;
  bucket.bucket_bytes = model.bucket_bytes();
  bucket.microbatches = static_cast<int>(microbatches_);
  // A hook adds up the replicas' sums; none but them has a sum of its own.
  bucket.gradient_shards = model.has_comm_hook() ? replicas : shards_;
  bucket.divisor = options.average_grads_across_microbatches()
                       ? static_cast<double>(microbatches_ * coalesced_ * replicas)
                       : static_cast<double>(shards_);
  bucket.overlapping = options.overlapping_allreduce();
  bucket.backward_passes = static_cast<int>(options.backward_passes_per_step());
  bucket.gradient_as_bucket_view = options.gradient_as_bucket_view();
  bucket.gradients_as_summed = model.half().has_value();
  return bucket;
}

/// Makes the sums of gradients, anew when a checkpoint with other gradient shards was loaded.
void StepProgram::make_gradients() {
  if (runtime_->gradient_shards() == shards_) return;
  shards_ = runtime_->gradient_shards();
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
    const dp::BucketOptions bucket = bucket_options(*model);
    const auto pieces = model->pieces();
    if (pieces) check_still_trained(*pieces, parameters);
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

/// Sees to it that the step is recorded as far as a record is wanted.
void StepProgram::begin_records(const Inputs& inputs, pipeline::Executor::Step& step) {
  if (!replay_check_ && !hashed_) return;
  records_.clear();
  step.records = &records_;
  if (replay_check_) {
    std::vector<graph::RandomKey> keys;
    for (const auto& microbatch : step.microbatches) keys.push_back(microbatch.key);
    replay_check_->begin_step(
        {inputs.name, std::move(keys), inputs.constants, together_.is_complete});
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
  std::vector<graph::ConstantOverride> constants;
  for (const auto& [op, argument] : overridden_constants_) {
    constants.push_back({op, argument, graph_->operators[op].arguments[argument].constant});
  }
  std::vector<graph::ContentOverride> contents;
  for (graph::ValueId id : overridden_contents_) {
    contents.push_back({id, graph_->values[id].content});
  }
  for (auto& list : inputs.constants) {
    list.insert(list.begin(), constants.begin(), constants.end());
  }
  for (auto& list : inputs.contents) list.insert(list.begin(), contents.begin(), contents.end());
}

StepProgram::Outputs StepProgram::run(Inputs inputs) {
  if (runtime_->parameter_shards()) runtime_->parameter_shards()->parameters()->take_back();
  if (graph_->trains() || runtime_->parameter_shards()) forget_copies(*runtime_);
  const graph::UnseenScope present(absent_);
  complete_overrides(inputs);
  if (graph_->trains()) begin_training(inputs.name);
  pipeline::Executor::Step step = take_operands(inputs);
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
  return outputs;
}

/// Takes the tensors out of the inputs. Constants stay there, too, for records.
pipeline::Executor::Step StepProgram::take_operands(Inputs& inputs) {
  pipeline::Executor::Step step;
  for (int64_t m = 0; m < microbatches_; ++m) {
    pipeline::Executor::Microbatch& microbatch = step.microbatches.emplace_back();
    microbatch.inputs = std::move(inputs.tensors[m]);
    microbatch.key = {*runtime_->progress.seed, inputs.random_stream, inputs.step_call,
                      global_microbatch(m)};
    // Lists that are one for all hold from the first on.
    const bool changes = has_overrides() && m < static_cast<int64_t>(inputs.constants.size());
    if (!changes) continue;
    microbatch.constants = inputs.constants[m];
    microbatch.contents = std::move(inputs.contents[m]);
  }
  step.keeps_history = keeps_history_;
  step.keeps_losses = losses_.begin(*runtime_, inputs.step_call);
  step.why_no_device_graphs = why_no_device_graphs();
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
core::Refusal StepProgram::why_no_device_graphs() const {
  if (changes_numbers()) return "numbers that the step function uses change between its calls";
  if (replay_check_ || hashed_)
    return "computations are recorded (\"replay_check\", \"record_hashes\")";
  if (runtime_->config().gradient_accumulation_fusion())
    return "weights add up gradients themselves (\"gradient_accumulation_fusion\")";
  if (runtime_->parameter_shards())
    return "parameters are divided (\"sharded_data_parallel_degree\")";
  if (keeps_history_) return "outputs keep their history (detach_outputs(false))";
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

}  // namespace smp::runtime
