// SPDX-License-Identifier: Apache-2.0
#include "runtime/runtime.h"

#include <unistd.h>

#include <random>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "comm/c10d/process_group.h"
#include "comm/device/device_communicator.h"
#include "comm/nccl/nccl_groups.h"
#include "core/check.h"
#include "core/deterministic.h"
#include "core/env.h"
#include "core/failure.h"
#include "core/log.h"
#include "graph/offload_store.h"
#include "nn/tensor_group.h"
#include "runtime/first_difference.h"
#include "runtime/model.h"
#include "runtime/save/kept_copy.h"
#include "runtime/step/replica_join.h"
#include "runtime/update/optimizer_states.h"
#include "runtime/update/update_watch.h"

namespace smp::runtime {
namespace {

std::shared_ptr<Runtime>& process_runtime() {
  static std::shared_ptr<Runtime> runtime;
  return runtime;
}

std::shared_ptr<Runtime>& thread_runtime() {
  thread_local std::shared_ptr<Runtime> runtime;
  return runtime;
}

Config effective(const Config& config) {
  Config merged = config.merged_with_environment();
  merged.validate();
  SMP_CHECK_WITH(ConfigError, merged.ddp_dist_backend() != "nccl" || comm::has_nccl(),
                 "config key \"ddp_dist_backend\": \"nccl\" needs a build with NCCL, which this is "
                 "not. Build for CUDA (docs/cuda.md), or use \"auto\"");
  return merged;
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

/// The name of a job for users: the number that it was given, else the process of rank 0.
std::string job_name() {
  if (const auto id = core::env("SMP_JOB_ID")) return *id;
  const auto id = core::env("TORCHELASTIC_RUN_ID");
  return id && *id != "none" ? *id : std::to_string(getpid());  // "none" is torchrun's default
}

/// Collective: rank 0 says which job this is.
std::shared_ptr<core::Status> make_status(comm::Communicator& world,
                                          const std::vector<std::string>& hosts, double stall) {
  std::random_device random;
  const std::string job =
      comm::broadcast_bytes(world, c10::str(random(), "-", random(), " ", job_name()), 0);
  const size_t id_end = job.find(' ');
  core::StatusOwner owner;
  owner.job_id = job.substr(0, id_end);
  owner.job = job.substr(id_end + 1);
  owner.rank = world.rank();
  owner.hosts = hosts;
  return std::make_shared<core::Status>(owner, milliseconds(stall));
}

/// The groups whose ranks exchange tensors of the models.
constexpr CommGroup kModelGroups[] = {CommGroup::kPp, CommGroup::kTp, CommGroup::kRdp,
                                      CommGroup::kDp};

/// Tells of properties that users would otherwise find out by bits that differ, or by time that is
/// lost.
void tell_of_device(const Runtime& runtime, at::Device device) {
  if (!core::uses_deterministic_kernels()) {
    core::log_info(c10::str("bits on ", device,
                            " may differ from run to run: some kernels add in another order each "
                            "time. \"deterministic\": true takes those that do not"));
  }
  std::map<std::string, std::string> groups;  // groups by the way that their tensors go
  for (CommGroup kind : kModelGroups) {
    const comm::Communicator& group = *runtime.group(kind);
    const std::string route = comm::device_route(group);
    if (!route.empty()) groups[route] += " " + group.name();
  }
  for (const auto& [route, names] : groups) {
    core::log_info(c10::str("tensors on ", device, " go ", route, ". Groups:", names));
  }
}

}  // namespace

Runtime::Runtime(const Config& config, comm::CommunicatorPtr world, std::vector<std::string> hosts)
    : config_(effective(config)), world_(std::move(world)), topology_(config_, hosts) {
  const auto context = [&] {
    std::string text = c10::str("smp rank ", rank());
    if (topology_.pp_size() > 1) {
      text += c10::str(" pp ", rank_in(CommGroup::kPp), "/", topology_.pp_size());
    }
    if (topology_.rdp_size() > 1) {
      text += c10::str(is_tensor_parallel() ? " rdp " : " dp ", rank_in(CommGroup::kRdp), "/",
                       topology_.rdp_size());
    }
    if (topology_.tp_size() > 1) {
      text += c10::str(" tp ", rank_in(CommGroup::kTp), "/", topology_.tp_size());
    }
    return text;
  };
  if (world_->size() > 1) core::set_error_context(context());
  const auto timeout = milliseconds(config_.timeout_seconds());
  world_->set_timeout(timeout);
  status_ = make_status(*world_, hosts, config_.stall_seconds());
  check_same_configuration();
  restart = agree_on_restart(*world_);
  copy_holders = find_copy_holders(config_, *world_);
  note_what_was_before(*this);
  if (rank() == 0) {
    core::note_configuration(config_.to_json());
    for (const std::string& line : config_.overridden()) core::log_info(line);
  }
  // Settings of the world, inherited by its splits.
  world_->check_collectives(config_.check_collectives());
  world_->set_device_transport(
      {config_.ddp_dist_backend() == "nccl", config_.numerics() == "fast"});
  make_groups(timeout);
  update_watch = std::make_shared<UpdateWatch>(*this);
  replica_join = std::make_shared<ReplicaJoin>(*this);
  optimizer_states_ = std::make_shared<OptimizerStates>();
  nn::set_tensor_group([] { return get().tensor_group(); });
  nn::set_default_optimize([] { return get().config().optimize(); });
}

bool Runtime::notes_progress() const {
  const bool is_first = copy_holders != nullptr && copy_holders->is_first();
  return rank() == 0 || (is_first && !core::env(core::kFailureDirVariable));
}

void Runtime::make_groups(std::chrono::milliseconds timeout) {
  const auto make = [&](std::string name, const std::vector<int>& members) {
    name += "[";
    for (int member : members) name += (name.back() == '[' ? "" : ",") + std::to_string(member);
    auto group = world_->split(members, name + "]");
    group->set_timeout(timeout);
    return group;
  };
  groups_[CommGroup::kWorld] = world_;
  for (CommGroup group :
       {CommGroup::kPp, CommGroup::kTp, CommGroup::kRdp, CommGroup::kMp, CommGroup::kDp}) {
    groups_[group] = make(to_string(group), topology_.members(group, rank()));
  }
  same_parts_ = world_;
  if (!is_tensor_parallel()) return;
  std::vector<int> members;
  for (int other = 0; other < world_->size(); ++other) {
    if (topology_.tp_rank(other) == topology_.tp_rank(rank())) members.push_back(other);
  }
  same_parts_ = make("same parts", members);
}

comm::Axis Runtime::axis(CommGroup group, std::optional<int> size) const {
  const std::vector<int> members = topology_.members(group, 0);
  const int stride = members.size() > 1 ? members[1] - members[0] : 1;
  return {stride, size.value_or(static_cast<int>(members.size()))};
}

comm::CommunicatorPtr Runtime::tensor_group() const {
  return lent ? rank_alone_ : group(CommGroup::kTp);
}

comm::CommunicatorPtr Runtime::rank_alone() {
  if (rank_alone_ != nullptr) return rank_alone_;
  const int rank = rank_in(CommGroup::kTp);
  rank_alone_ = group(CommGroup::kTp)->split({rank}, c10::str("alone[", this->rank(), "]"));
  return rank_alone_;
}

void Runtime::check_same_configuration() const {
  const auto all = comm::all_gather_bytes(*world_, config_.to_json());
  const size_t other = first_other(all);
  SMP_CHECK_WITH(ConfigError, other == 0, "the configuration differs between ranks. Rank 0 has ",
                 all[0], ", rank ", other, " has ", all[other],
                 ". Start all ranks with the same configuration");
}

Runtime& Runtime::get() { return *get_shared(); }

std::shared_ptr<Runtime> Runtime::get_shared() {
  const auto& runtime = thread_runtime() ? thread_runtime() : process_runtime();
  SMP_CHECK_WITH(UsageError, runtime != nullptr,
                 "smp is not initialised; call smp::init(config) at the start of main()");
  return runtime;
}

bool Runtime::exists() { return thread_runtime() != nullptr || process_runtime() != nullptr; }

void Runtime::set_for_process(std::shared_ptr<Runtime> runtime) {
  if (runtime) core::set_process_status(runtime->status());
  process_runtime() = std::move(runtime);
}

std::shared_ptr<Runtime> Runtime::set_for_thread(std::shared_ptr<Runtime> runtime) {
  core::set_thread_status(runtime ? runtime->status() : nullptr);
  return std::exchange(thread_runtime(), std::move(runtime));
}

at::Device Runtime::device() const {
  if (device_) return *device_;
  const auto& entries = table_.entries();
  return entries.empty() ? at::Device(at::kCPU) : entries.front().tensor.device();
}

void Runtime::choose_device(at::Device chosen) {
  SMP_CHECK_WITH(UsageError, !partitioned() || chosen == device(), "smp::set_device chose ", chosen,
                 " after the first step, which has put this rank's part of the models on ",
                 device(), ". Call it before");
  device_ = chosen;
}

void Runtime::use_device(at::Device device) {
  for (CommGroup group : kModelGroups) {
    groups_[group] = comm::make_device_communicator(groups_[group], device);
  }
  if (rank() == 0 && !device.is_cpu()) tell_of_device(*this, device);
}

c10::intrusive_ptr<c10d::ProcessGroup> Runtime::process_group(CommGroup group) {
  auto& made = process_groups_[group];
  if (!made) made = comm::make_process_group(groups_.at(group));
  return made;
}

void Runtime::add_model(const std::shared_ptr<Model>& model) {
  SMP_CHECK_WITH(UsageError, !current_step.is_running,
                 "a DistributedModel was made inside a step function; make it before the first "
                 "step");
  SMP_CHECK_WITH(UsageError, !partitioned(),
                 "a DistributedModel was made after the first step, when the models had been "
                 "divided among the ranks; make all models before");
  for (const auto& other : models()) {
    SMP_CHECK_WITH(UsageError, other->module_ptr() != model->module_ptr(),
                   "this module is wrapped in a DistributedModel already; use that one");
  }
  model->add_to(table_);
  models_.push_back(model);
  for (const auto& [name, split] : model->split_parameters()) {
    if (split.ranks == 1) continue;
    SMP_CHECK_WITH(UsageError, split.ranks == topology_.tp_size(), "parameter \"", name,
                   "\" is divided among ", split.ranks,
                   " ranks, and \"tensor_parallel_degree\" is ", topology_.tp_size(),
                   ". Construct modules of smp::nn after smp::init");
    table_.divide(name, split, axis(CommGroup::kTp), /*captured_whole=*/false);
  }
}

std::vector<std::shared_ptr<Model>> Runtime::models() const {
  std::vector<std::shared_ptr<Model>> result;
  for (const auto& model : models_) {
    if (auto alive = model.lock()) result.push_back(std::move(alive));
  }
  return result;
}

std::shared_ptr<graph::TensorStore> Runtime::activation_store() {
  if (activation_store_ == nullptr) {
    activation_store_ =
        std::make_shared<graph::OffloadStore>(config_.offload_directory().value_or(""));
  }
  return activation_store_;
}

std::shared_ptr<comm::ChannelPool> Runtime::pipeline_channels() {
  if (pipeline_channels_ == nullptr) {
    pipeline_channels_ = std::make_shared<comm::ChannelPool>(group(CommGroup::kPp));
  }
  return pipeline_channels_;
}

int Runtime::gradient_shards() const {
  if (config_.gradient_shards() > 0) return static_cast<int>(config_.gradient_shards());
  return progress.gradient_shards > 0 ? progress.gradient_shards : topology_.rdp_size() * batches();
}

void Runtime::fail(const std::exception& error) noexcept {
  core::record_failure(rank(), error);
  if (world_->size() > 1) world_->abort(core::message_of(error));
}

void Runtime::fail(const std::string& reason) noexcept {
  core::record_failure(rank(), reason);
  if (world_->size() > 1) world_->abort(reason);
}

}  // namespace smp::runtime
