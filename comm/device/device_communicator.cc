// SPDX-License-Identifier: Apache-2.0
#include "comm/device/device_communicator.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <utility>

#include "comm/device/ipc_channels.h"
#include "comm/device/staged_communicator.h"
#include "comm/device/staging.h"
#include "comm/device/thread_memory.h"
#include "comm/nccl/group_communicator.h"
#include "comm/nccl/nccl_groups.h"
#include "comm/process_end.h"
#include "comm/reduce.h"
#include "comm/transport_communicator.h"
#include "core/check.h"
#include "core/env.h"
#include "core/refusal.h"

namespace smp::comm {

DeviceCommunicator::DeviceCommunicator(CommunicatorPtr host, at::Device device)
    : host_(std::move(host)), device_(device) {}

WorkPtr DeviceCommunicator::isend(const at::Tensor& tensor, int destination, Tag tag) {
  if (!is_on_device("isend", tensor)) {
    return host_->isend(tensor, destination, tag);
  }
  const at::Tensor staged = staged_copy(tensor);
  return staged_work(host_->isend(staged, destination, tag), staged, at::Tensor());
}

WorkPtr DeviceCommunicator::irecv(const at::Tensor& tensor, int source, Tag tag) {
  if (!is_on_device("irecv", tensor)) {
    return host_->irecv(tensor, source, tag);
  }
  const at::Tensor staged = staging_room(tensor);
  return staged_work(host_->irecv(staged, source, tag), staged, tensor);
}

WorkPtr DeviceCommunicator::start(const Collective& call) {
  if (!is_on_device(call)) {
    return host_->start(call);
  }
  return moves(call) ? start_on_device(call) : host_->async().barrier();
}

// Checks a call on tensors of the device. In a group of one it is done then.
bool DeviceCommunicator::moves(const Collective& call) const {
  if (call.reduces()) {
    check_can_reduce(name(), call.name(), call.input.scalar_type(), call.op);
  }
  if (size() > 1) {
    return true;
  }
  if (!call.output.is_same(call.input)) {
    const at::NoGradGuard no_grad;
    call.output.view({-1}).copy_(call.input.view({-1}));
  }
  return false;
}

WorkPtr DeviceCommunicator::start(at::Device device, CollectiveTask task) {
  if (device.is_cpu()) {
    return host_->start(device, std::move(task));
  }
  if (size() > 1) {
    return start_on_device(task);
  }
  TaskCollectives alone([this](const Collective& call) { run(call); });
  task(alone);
  return host_->async().barrier();
}

void DeviceCommunicator::run(const Collective& call) {
  if (!is_on_device(call)) {
    host_->run(call);
  } else if (moves(call)) {
    run_on_device(call);
  }
}

Channels DeviceCommunicator::open_channels(const std::vector<ChannelSpec>& outgoing,
                                           const std::vector<ChannelSpec>& incoming) {
  return host_->open_channels(outgoing, incoming);
}

CommunicatorPtr DeviceCommunicator::split(const std::vector<int>& members,
                                          const std::string& name) {
  return make_device_communicator(host_->split(members, name), device_);
}

// An undefined tensor is the other communicator's to refuse.
bool DeviceCommunicator::is_on_device(const char* verb, const at::Tensor& tensor) const {
  if (!tensor.defined() || tensor.is_cpu()) {
    return false;
  }
  SMP_CHECK_WITH(UsageError, tensor.device() == device_, verb, " on group '", name(),
                 "': this rank communicates tensors of ", device_, " and of the CPU, got one on ",
                 tensor.device(), ". Move it to the model's device first.");
  return true;
}

bool DeviceCommunicator::is_on_device(const Collective& call) const {
  return is_on_device(call.name(), call.writes(rank()) ? call.output : call.input);
}

namespace {

/// How ranks could send tensors from device to device, the same on all of them.
struct Ways {
  core::Refusal no_nccl;       ///< why NCCL cannot
  DeviceIpc* ipc = nullptr;    ///< the memory that they share, in place of NCCL; null where not
  core::Refusal refusal = {};  ///< why not, where it might have been
};

/// The use of memory that devices share, in place of NCCL or of host memory.
enum class IpcUse { kNone, kWithoutNccl, kAlways };

/// The wish of the ranks' users, the same on all ranks. Collective.
IpcUse wanted_ipc(Communicator& host) {
  IpcUse wanted = IpcUse::kWithoutNccl;
  const auto values = all_gather_bytes(host, core::env("SMP_DEVICE_IPC").value_or(""));
  for (size_t rank = 0; rank < values.size(); ++rank) {
    const std::string& value = values[rank];
    SMP_CHECK_WITH(
        ConfigError, value.empty() || value == "0" || value == "1",
        "environment variable SMP_DEVICE_IPC on rank ", rank, " of group '", host.name(),
        "': expected 0 or 1, got \"", value, "\". Unset it to use ",
        "NCCL where each rank has a GPU of its own, and memory that GPUs share elsewhere");
    if (value == "1" && wanted != IpcUse::kNone) wanted = IpcUse::kAlways;
    if (value == "0") wanted = IpcUse::kNone;
  }
  return wanted;
}

core::Refusal why_not_shared(Communicator& host, DeviceIpc& ipc, at::Device device) {
  if (!is_one_host(host)) return "the ranks of the group are on several hosts";
  if (!has_turns(host)) return "the ranks of the group share no memory of their host";
  return is_one_process(host) ? std::nullopt : why_not_ipc(host, ipc, device);
}

/// Ranks of one host that NCCL does not connect share memory of devices.
void find_ipc(Communicator& host, at::Device device, Ways& ways) {
  const IpcUse wanted = wanted_ipc(host);
  DeviceIpc* const ipc = is_one_process(host) ? &thread_memory() : device_ipc(device.type());
  const bool is_nccl_better =
      !ways.no_nccl && (wanted != IpcUse::kAlways || host.device_transport().only_nccl);
  if (ipc == nullptr || is_nccl_better) return;
  ways.refusal = wanted == IpcUse::kNone ? "SMP_DEVICE_IPC=0" : why_not_shared(host, *ipc, device);
  if (!ways.refusal) ways.ipc = ipc;
}

/// `gpus`: as `nccl_gpu` names them, by rank.
core::Refusal why_not_nccl(at::Device device, const std::vector<std::string>& gpus) {
  const std::set<std::string> different(gpus.begin(), gpus.end());
  const bool all_have_gpus = different.count("") == 0;
  if (all_have_gpus && different.size() == gpus.size()) return std::nullopt;
  if (all_have_gpus) return "ranks share a GPU";
  if (!device.is_cuda()) return "NCCL knows GPUs only";
  if (!has_nccl()) return "this build has no NCCL (docs/cuda.md)";
  return "not every rank has its model on a GPU";
}

std::string route_text(const Communicator& host, const Ways& ways) {
  if (ways.ipc != nullptr) {
    return is_one_process(host) ? "on the device, since the ranks are threads of one process"
                                : "through memory of the device that the processes share (IPC)";
  }
  std::string text;
  if (is_one_process(host)) {
    text = "from stage to stage on the device, since the ranks are threads of one process, else ";
  }
  text += ways.no_nccl ? "through host memory: " + *ways.no_nccl
                       : "over NCCL, from GPU to GPU: each rank has one of its own";
  if (ways.refusal) text += "; memory of the device cannot be shared (IPC): " + *ways.refusal;
  return text;
}

}  // namespace

CommunicatorPtr make_device_communicator(const CommunicatorPtr& host, at::Device device) {
  const bool only_nccl = host->device_transport().only_nccl;
  if (device.is_cpu() && (!only_nccl || host->size() == 1)) {
    return host;
  }
  end_before_objects_of(device);
  const std::vector<std::string> gpus = all_gather_bytes(*host, nccl_gpu(device));
  const auto without = std::find(gpus.begin(), gpus.end(), "") - gpus.begin();
  Ways ways{why_not_nccl(device, gpus)};
  SMP_CHECK_WITH(ConfigError, !ways.no_nccl || !only_nccl || gpus.size() == 1,
                 "config key \"ddp_dist_backend\": \"nccl\" needs a GPU of its own on each rank, "
                 "and of group '",
                 host->name(), "' ",
                 without == host->size() ? std::string("several ranks share one")
                                         : c10::str("rank ", without, " has its model on none"),
                 ". Give each rank a GPU, smp::set_device(smp::local_rank()), or use \"auto\"");
  if (gpus.size() == 1) {
    return make_staged_communicator(host, device, nullptr);
  }
  find_ipc(*host, device, ways);
  const CommunicatorPtr made = ways.no_nccl || ways.ipc != nullptr
                                   ? make_staged_communicator(host, device, ways.ipc)
                                   : make_group_communicator(host, device, nccl_groups(host));
  dynamic_cast<DeviceCommunicator&>(*made).route_ = route_text(*host, ways);
  return made;
}

std::string device_route(const Communicator& group) {
  const auto* of_device = dynamic_cast<const DeviceCommunicator*>(&group);
  return of_device == nullptr ? "" : of_device->route_;
}

}  // namespace smp::comm
