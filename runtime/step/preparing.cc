// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/preparing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "core/check.h"
#include "graph/recording.h"
#include "nn/parameter_sharding.h"
#include "runtime/first_difference.h"
#include "runtime/model.h"
#include "runtime/parameters/delayed.h"
#include "runtime/parameters/placement.h"
#include "runtime/step/checkpointed_modules.h"
#include "runtime/step/cost_measurement.h"
#include "runtime/step/pipeline_choice.h"
#include "runtime/update/optimizer_states.h"

namespace smp::runtime {
namespace {

/// Names, shapes and types of everything registered, hooks, and the modules that run again, one
/// line each.
std::string describe_models(const Runtime& runtime) {
  std::ostringstream out;
  for (const auto& entry : runtime.table().entries()) {
    out << graph::to_string(entry.kind) << " " << entry.name << " : "
        << graph::TensorMeta::of(entry.tensor).to_string();
    for (const auto& alias : entry.aliases) out << " = " << alias;
    if (graph::is_deferred(entry.values())) out << " (delayed)";
    if (entry.is_divided()) out << ", a part of " << entry.sharding.to_string();
    out << "\n";
  }
  for (const auto& model : runtime.models()) {
    if (model->has_comm_hook()) out << "communication hook " << model->options().name() << "\n";
  }
  for (const auto& modules : checkpointed_modules(runtime)) {
    out << "checkpointed, in groups of " << modules.group << ":";
    for (const auto& module : modules.modules) out << " " << module;
    out << "\n";
  }
  return out.str();
}

void check_same_models(const Runtime& runtime) {
  const auto all = comm::all_gather_bytes(*runtime.world(), describe_models(runtime));
  const size_t other = first_other(all);
  if (other == 0) return;
  const auto [a, b] = first_difference(all[0], all[other]);
  core::fail<UsageError>("the model differs between ranks: rank 0 has ", a, ", rank ", other,
                         " has ", b, ". Build the same model on every rank");
}

/// Where this rank computes. Models may wait in host memory for the device that was chosen.
void settle_device(Runtime& runtime) {
  const at::Device device = runtime.device();
  for (const auto& entry : runtime.table().entries()) {
    const at::Device lies_on = entry.tensor.device();
    const bool waits = runtime.has_chosen_device() && lies_on.is_cpu();
    SMP_CHECK_WITH(UsageError, lies_on == device || waits, "\"", entry.name, "\" is on device ",
                   lies_on, ", and this rank computes on ", device,
                   runtime.has_chosen_device()
                       ? ", which smp::set_device chose"
                       : c10::str(", where \"", runtime.table().entries().front().name, "\" is"),
                   ". Leave modules on the CPU and call smp::set_device(smp::local_rank()), which "
                   "has the first step move them, or move each whole module before it is wrapped");
  }
  const auto kinds = comm::all_gather_bytes(*runtime.world(), c10::DeviceTypeName(device.type()));
  const size_t other = first_other(kinds);
  SMP_CHECK_WITH(UsageError, other == 0,
                 "the ranks compute on different kinds of devices: rank 0 "
                 "on ",
                 kinds[0], ", rank ", other, " on ", kinds[other],
                 ". Call smp::set_device on every rank or on none");
  runtime.use_device(device);
}

/// The share of a device that is left for tensors, at least: kernels, NCCL and an allocator's gaps
/// take some.
constexpr double kForTensors = 0.9;

/// The least that any rank has of its device's memory, which ranks of a host may share.
void settle_device_share(Runtime& runtime) {
  const at::Device device = runtime.device();
  // The user chose a plan that was loaded.
  if (device.is_cpu() || runtime.config().load_partition()) return;
  const auto& host = runtime.topology().host(runtime.rank());
  const auto devices = comm::all_gather_bytes(*runtime.world(), c10::str(host, " ", device));
  const auto sharing = std::count(devices.begin(), devices.end(), devices[runtime.rank()]);
  const size_t total = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).second;
  const double share = kForTensors * static_cast<double>(total) / static_cast<double>(sharing);
  const auto least = at::tensor(static_cast<int64_t>(share));
  runtime.world()->all_reduce(least, ReduceOp::kMin);
  runtime.first_step.device_share = least.item<int64_t>();
}

void broadcast_values(const Runtime& runtime) {
  at::NoGradGuard no_grad;
  for (const auto& entry : runtime.table().entries()) {
    if (graph::is_deferred(entry.values())) continue;
    const at::Tensor copy = entry.values().detach().cpu().contiguous();
    (entry.is_divided() ? runtime.same_parts() : runtime.world())->broadcast(copy, 0);
    if (!copy.is_alias_of(entry.values())) entry.values().detach().copy_(copy);
  }
}

}  // namespace

void prepare_models(Runtime& runtime) {
  SMP_CHECK_WITH(UsageError, !runtime.models().empty(),
                 "a step function ran, but no module was wrapped. Write smp::DistributedModel "
                 "model(net) before the first step and call model(x) in it");
  check_same_models(runtime);
  settle_device(runtime);
  settle_device_share(runtime);
  broadcast_values(runtime);
  runtime.settle_seed();
  // Read once, so that ranks of other hosts run the same.
  const std::string schedule = runtime.rank() == 0 ? read_schedule(runtime.config()) : "";
  runtime.first_step.schedule = comm::broadcast_bytes(*runtime.world(), schedule, 0);
  runtime.first_step.costs = settle_costs(runtime);
  runtime.first_step.state_factors =
      agree_on_state_factors(runtime, runtime.table(), runtime.optimizers);
  if (has_delayed(runtime.table())) {
    agree_on_construction(runtime);
    make_shared_tensors(runtime);
  }
  show_on_device(runtime);
}

}  // namespace smp::runtime
