// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/channel_pool.h"
#include "comm/communicator.h"
#include "graph/tensor_store.h"
#include "runtime/job.h"
#include "runtime/living.h"
#include "runtime/parameters/parameter_table.h"
#include "runtime/run_state.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace smp::runtime {

class CheckpointContext;
class LentWholes;
class Model;
class Optimizer;
class ReplicaJoin;
class UpdateWatch;

/// The state of a rank's program: its job, groups, models, owners of parameters and steps.
/// Internal; the public functions and classes use it. A rank that is a thread has a runtime of its
/// own; otherwise the process has one. Belongs to the rank's thread. The folders of runtime/ work
/// on it and keep objects of theirs here, which `start_runtime` makes; it knows nothing of them.
class Runtime : public Job {
 public:
  /// Collective over `world`; throws as `Job`. For tests and `start_runtime`.
  Runtime(const Config& config, comm::CommunicatorPtr world, const std::vector<std::string>& hosts);

  /// The runtime of this thread or process; throws `UsageError` before `init`.
  static Runtime& get();
  static std::shared_ptr<Runtime> get_shared();
  static bool exists();
  /// Whether no other rank is a thread of this process.
  bool is_alone_in_process() const;
  /// Sets the runtime of the process, or of this thread, and its status; null ends it, but for the
  /// status of the process, which goes on until the ranks have parted.
  static void set_for_process(std::shared_ptr<Runtime> runtime);
  /// Returns the one that this thread had.
  static std::shared_ptr<Runtime> set_for_thread(std::shared_ptr<Runtime> runtime);

  /// The communicator of this rank's group; made at `init`.
  comm::CommunicatorPtr group(CommGroup group) const { return groups_.at(group); }
  /// The ranks that hold the same parameters as this one, and run other samples.
  comm::CommunicatorPtr replicas() const { return group(CommGroup::kRdp); }
  /// This rank's group along an axis: of one of the kinds, or one that was added.
  comm::CommunicatorPtr along(const core::Axis& over) const;
  void add_group(const core::Axis& over, comm::CommunicatorPtr group);
  /// The ranks that have this one's parts of divided parameters before partitioning: those of its
  /// tp_rank.
  comm::CommunicatorPtr same_parts() const { return same_parts_; }
  /// Where this rank computes: the device chosen, else that of its models.
  at::Device device() const;
  bool has_chosen_device() const { return device_.has_value(); }
  /// Throws `UsageError` when the models are on another one since the first step.
  void choose_device(at::Device device);
  /// From now on the groups whose ranks exchange tensors of the models take those of `device`, too.
  /// Collective over `world`; all ranks' devices are of one kind.
  void use_device(at::Device device);
  /// The c10d process group of this rank's group. Collective over the group at the first call.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group(CommGroup group);

  /// Adds a model; throws `UsageError` when its tensors' names clash with another model's.
  void add_model(const std::shared_ptr<Model>& model);
  /// The models that still exist, in the order they were wrapped.
  std::vector<std::shared_ptr<Model>> models() const { return models_.all(); }
  /// Parameters and buffers of all models.
  const ParameterTable& table() const { return table_; }
  ParameterTable& table() { return table_; }

  Progress progress;
  FirstStep first_step;
  CurrentStep current_step;
  StepInputs step_inputs;
  Execution execution;
  /// Settles `Progress::seed`, unless that is done: the one that the user set, or that the default
  /// generator of world rank 0 has. Collective over the world.
  void settle_seed();
  /// Whether the models are divided among the ranks.
  bool partitioned() const { return first_step.plan != nullptr; }
  /// Sharded data parallelism, once partitioned; null: parameters are whole.
  const ParameterShards* parameter_shards() const { return first_step.parameter_shards.get(); }
  /// Where activations are offloaded to; made at the first call.
  std::shared_ptr<graph::TensorStore> activation_store();
  /// The channels between the ranks of the pipeline, of all programs; made at the first call, when
  /// the group takes tensors of the models' device.
  std::shared_ptr<comm::ChannelPool> pipeline_channels();

  /// Divided layers that `model->cpu()` has put together; null: nothing.
  std::shared_ptr<LentWholes> lent;
  /// The ranks with which divided layers communicate: the tensor-parallel group, or this rank alone
  /// while it has them whole.
  comm::CommunicatorPtr tensor_group() const;
  /// This rank alone. Collective over the tensor-parallel group at the first call.
  comm::CommunicatorPtr rank_alone();

  Living<const Optimizer> optimizers;
  /// A save under way and the state in checkpoints beside models and optimizers; never null.
  std::shared_ptr<CheckpointContext> checkpoint_context;
  /// Watches the program's use of its steps; never null.
  std::shared_ptr<UpdateWatch> update_watch;
  /// Whether replicas may run out of batches; never null.
  std::shared_ptr<ReplicaJoin> replica_join;

  /// Whether this rank has the parameter or buffer: as its owner, or as all before partitioning.
  bool owns(const ParameterTable::Entry& entry) const { return entry.sharding.is_on(rank()); }
  bool owns(const std::string& name) const { return owns(table_.at(name)); }

  /// The configuration's `gradient_shards`, else the loaded checkpoint's, else the number of
  /// batches that all ranks are given.
  int gradient_shards() const;
  /// How many of them a replica adds up; at least one.
  int shards_of_replica() const { return std::max(gradient_shards() / topology().rdp_size(), 1); }

 private:
  void make_groups();

  std::map<CommGroup, comm::CommunicatorPtr> groups_;
  std::map<CommGroup, c10::intrusive_ptr<c10d::ProcessGroup>> process_groups_;
  comm::CommunicatorPtr same_parts_;
  comm::CommunicatorPtr rank_alone_;  // once `rank_alone` was called
  Living<Model> models_;
  ParameterTable table_;
  std::optional<at::Device> device_;
  std::shared_ptr<graph::TensorStore> activation_store_;
  std::shared_ptr<comm::ChannelPool> pipeline_channels_;
  std::vector<std::pair<core::Axis, comm::CommunicatorPtr>> added_groups_;
};

/// Sets the runtime of this thread until the end of the block, which gives it back the one before.
class ThreadRuntime {
 public:
  explicit ThreadRuntime(std::shared_ptr<Runtime> runtime)
      : before_(Runtime::set_for_thread(std::move(runtime))) {}
  ~ThreadRuntime() { Runtime::set_for_thread(before_); }
  ThreadRuntime(const ThreadRuntime&) = delete;
  ThreadRuntime& operator=(const ThreadRuntime&) = delete;

 private:
  const std::shared_ptr<Runtime> before_;
};

}  // namespace smp::runtime
