// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/refusal.h"
#include "dp/gradient_buckets.h"
#include "dp/sharded_gradients.h"
#include "graph/graph.h"
#include "partitioner/plan.h"
#include "pipeline/gradient_sums.h"
#include "pipeline/timeline.h"
#include "runtime/parameters/foreign.h"
#include "runtime/runtime.h"
#include "runtime/step/loss_watch.h"
#include "runtime/step/planning.h"
#include "runtime/step/recorded_rows.h"
#include "runtime/step/replay_check.h"
#include "runtime/step/replica_join.h"
#include "runtime/step/replica_pace.h"
#include "runtime/step/schedule_runner.h"
#include "smp/step_options.h"

namespace smp::runtime {

/// A graph made ready to run on this rank: its plan, the runner of its schedule, and the sums of
/// its gradients, for one number of microbatches. Internal.
class StepProgram : public std::enable_shared_from_this<StepProgram> {
 public:
  /// `settled`: as for `plan_step`. `options`: those of the step function, for its outputs.
  /// `coalesced`: how many of the user's microbatches each one of the graph's stands for, which
  /// gradients are divided by.
  StepProgram(std::shared_ptr<Runtime> runtime, PlannedGraph planned, int64_t microbatches,
              bool settled, const StepOptions& options, int64_t coalesced);

  /// One step's inputs and constants.
  struct Inputs {
    std::vector<std::vector<at::Tensor>> tensors;  ///< tensors by microbatch, then graph input
    /// Constants by microbatch, or one entry for all; operators are counted as they run.
    std::vector<std::vector<graph::ConstantOverride>> constants;
    std::vector<std::vector<graph::ContentOverride>> contents;
    std::string name;            ///< name of the step function
    uint64_t random_stream = 0;  ///< number of its random stream
    uint64_t step_call = 0;      ///< how many calls of it came before
  };

  /// Runs the schedule and, if the graph trains, reduces gradients into `.grad`. Returns the
  /// graph's outputs by position and microbatch, on every rank of the pipeline as far as they are
  /// shared.
  std::vector<std::vector<at::Tensor>> run(Inputs inputs);

  /// Takes part, with gradients of zero, in a step of other replicas; see `ReplicaJoin`.
  void take_part(const ReplicaJoin::Step& step, const std::string& name);

  /// Whether a stage of this rank reads the step's input at this position.
  bool reads_input(size_t position) const;

  /// See `ScheduleRunner::describe`.
  std::string describe() const { return runner_->describe(); }

  const partitioner::Plan& plan() const { return plan_; }
  const pipeline::Schedule& schedule() const { return runner_->schedule(); }

 private:
  using Outputs = std::vector<std::vector<at::Tensor>>;
  using Reductions = std::shared_ptr<const std::vector<pipeline::ReductionRecord>>;

  dp::BucketOptions bucket_options(const Model& model) const;
  void make_gradients();
  std::unique_ptr<dp::ShardedGradients> make_sharded_gradients(
      const dp::BucketOptions& bucket, const std::vector<graph::ValueId>& parameters) const;
  pipeline::Executor::Setup executor_setup(partitioner::Regions regions,
                                           const pipeline::Schedule& schedule, bool shares_all);
  void allocate_copies(const std::vector<pipeline::Frame::Copy>& copies);
  void begin_together(const ReplicaJoin::Step& step);
  void broadcast_buffers(int source);
  void begin_training(const std::string& name);
  Reductions observe_reductions(bool records);
  void finish_training(const std::string& name, ReplicaPace pace);
  uint64_t global_microbatch(int64_t microbatch) const;
  void complete_overrides(Inputs& inputs);
  void make_records(const graph::Graph& captured);
  pipeline::Executor::Step take_operands(Inputs& inputs);
  void begin_records(const Inputs& inputs, pipeline::Executor::Step& step);
  bool changes_numbers() const;
  core::Refusal why_no_device_graphs() const;
  bool has_overrides() const {
    return !overridden_constants_.empty() || !overridden_contents_.empty();
  }

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<const graph::Graph> graph_;
  partitioner::Plan plan_;
  int64_t microbatches_;
  int64_t coalesced_;
  bool keeps_history_;  // history of outputs
  ForeignGradients foreign_gradients_;
  std::unique_ptr<ScheduleRunner> runner_;
  std::vector<at::Tensor> absent_;              // those read here that the program must not
  std::shared_ptr<const RecordedRows> hashed_;  // rows of the hash log; null: off
  std::unique_ptr<ReplayCheck> replay_check_;   // null: off
  pipeline::StepRecords records_;               // records of the step that runs
  // Constants and contents that some step has overridden: (operator, argument) and values.
  std::set<std::pair<int, int>> overridden_constants_;
  std::set<graph::ValueId> overridden_contents_;
  int shards_ = 0;  // number of shards that these were made for
  // Sums by model, those of other numbers of microbatches, too, and the divisors of this one.
  std::vector<std::shared_ptr<dp::WholeGradients>> whole_;
  std::vector<double> divisors_;
  // Sums of divided parameters by model; empty without sharded data parallelism.
  std::vector<std::unique_ptr<dp::ShardedGradients>> sharded_;
  pipeline::GradientSums gradients_;  // those of both
  ReplicaJoin::Step together_;        // the replicas' common work in the step that runs
  LossWatch losses_;
};

}  // namespace smp::runtime
