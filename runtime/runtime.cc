// SPDX-License-Identifier: Apache-2.0
#include "runtime/runtime.h"

#include <ATen/CPUGeneratorImpl.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "comm/c10d/process_group.h"
#include "comm/device/device_communicator.h"
#include "core/check.h"
#include "core/deterministic.h"
#include "core/log.h"
#include "core/status.h"
#include "graph/offload_store.h"
#include "nn/tensor_group.h"
#include "runtime/model.h"

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

/// The groups whose ranks exchange tensors of the models.
constexpr CommGroup kModelGroups[] = {CommGroup::kPp, CommGroup::kTp, CommGroup::kRdp,
                                      CommGroup::kDp};

/// Tells of properties that users would otherwise find out by bits that differ, or by time that is
/// lost.
void tell_of_device(const std::map<CommGroup, comm::CommunicatorPtr>& made, at::Device device) {
  if (!core::uses_deterministic_kernels()) {
    core::log_info(c10::str("bits on ", device,
                            " may differ from run to run: some kernels add in another order each "
                            "time. \"deterministic\": true takes those that do not"));
  }
  std::map<std::string, std::string> groups;  // groups by the way that their tensors go
  for (CommGroup kind : kModelGroups) {
    const comm::Communicator& group = *made.at(kind);
    const std::string route = comm::device_route(group);
    if (!route.empty()) groups[route] += " " + group.name();
  }
  for (const auto& [route, names] : groups) {
    core::log_info(c10::str("tensors on ", device, " go ", route, ". Groups:", names));
  }
}

}  // namespace

Runtime::Runtime(const Config& config, comm::CommunicatorPtr world,
                 const std::vector<std::string>& hosts)
    : Job(config, std::move(world), hosts) {
  make_groups();
  nn::set_tensor_group([] { return get().tensor_group(); });
  nn::set_default_optimize([] { return get().config().optimize(); });
}

void Runtime::make_groups() {
  const auto make = [&](std::string name, const std::vector<int>& members) {
    name += "[";
    for (int member : members) name += (name.back() == '[' ? "" : ",") + std::to_string(member);
    auto group = world()->split(members, name + "]");
    group->set_timeout(world()->timeout());
    return group;
  };
  groups_[CommGroup::kWorld] = world();
  for (CommGroup group :
       {CommGroup::kPp, CommGroup::kTp, CommGroup::kRdp, CommGroup::kMp, CommGroup::kDp}) {
    groups_[group] = make(to_string(group), topology().members(group, rank()));
  }
  same_parts_ = world();
  if (!is_tensor_parallel()) return;
  same_parts_ = make("same parts", topology().axes("PD").members(rank()));
}

comm::CommunicatorPtr Runtime::along(const core::Axis& over) const {
  for (const auto& [axis, group] : added_groups_) {
    if (axis == over) return group;
  }
  for (const CommGroup kind : {CommGroup::kPp, CommGroup::kTp, CommGroup::kRdp}) {
    if (topology().axis(kind) == over) return group(kind);
  }
  SMP_INTERNAL_ASSERT(false, "no group along an axis of ", over.size, " ranks");
}

void Runtime::add_group(const core::Axis& over, comm::CommunicatorPtr group) {
  added_groups_.emplace_back(over, std::move(group));
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

Runtime& Runtime::get() { return *get_shared(); }

std::shared_ptr<Runtime> Runtime::get_shared() {
  const auto& runtime = thread_runtime() ? thread_runtime() : process_runtime();
  SMP_CHECK_WITH(UsageError, runtime != nullptr,
                 "smp is not initialised; call smp::init(config) at the start of main()");
  return runtime;
}

bool Runtime::exists() { return thread_runtime() != nullptr || process_runtime() != nullptr; }

bool Runtime::is_alone_in_process() const {
  return world()->size() == 1 || process_runtime().get() == this;
}

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
  if (rank() == 0 && !device.is_cpu()) tell_of_device(groups_, device);
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
  models_.add(model);
  for (const auto& [name, split] : model->split_parameters()) {
    if (split.ranks == 1) continue;
    SMP_CHECK_WITH(UsageError, split.ranks == topology().tp_size(), "parameter \"", name,
                   "\" is divided among ", split.ranks,
                   " ranks, and \"tensor_parallel_degree\" is ", topology().tp_size(),
                   ". Construct modules of smp::nn after smp::init");
    table_.divide(name, split, topology().axis(CommGroup::kTp), /*captured_whole=*/false);
  }
}

std::shared_ptr<graph::TensorStore> Runtime::activation_store() {
  if (activation_store_ == nullptr) {
    activation_store_ =
        std::make_shared<graph::OffloadStore>(config().offload_directory().value_or(""));
  }
  return activation_store_;
}

std::shared_ptr<comm::ChannelPool> Runtime::pipeline_channels() {
  if (pipeline_channels_ == nullptr) {
    pipeline_channels_ = std::make_shared<comm::ChannelPool>(group(CommGroup::kPp));
  }
  return pipeline_channels_;
}

void Runtime::settle_seed() {
  if (progress.seed) return;
  const int64_t configured = config().seed();
  const uint64_t seed = configured >= 0 ? static_cast<uint64_t>(configured)
                                        : at::detail::getDefaultCPUGenerator().current_seed();
  progress.seed = std::stoull(comm::broadcast_bytes(*world(), std::to_string(seed), 0));
}

int Runtime::gradient_shards() const {
  if (config().gradient_shards() > 0) return static_cast<int>(config().gradient_shards());
  return progress.gradient_shards > 0 ? progress.gradient_shards
                                      : topology().rdp_size() * batches();
}

}  // namespace smp::runtime
