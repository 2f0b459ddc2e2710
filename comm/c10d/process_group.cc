// SPDX-License-Identifier: Apache-2.0
#include "comm/c10d/process_group.h"

#include <ATen/DeviceAccelerator.h>

#include <numeric>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/c10d/backend.h"
#include "comm/store/store_communicator.h"

namespace smp::comm {
namespace {

c10::intrusive_ptr<c10d::ProcessGroup> with_backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto process_group =
      c10::make_intrusive<c10d::ProcessGroup>(store, backend->getRank(), backend->getSize());
  constexpr auto kCustom = c10d::ProcessGroup::BackendType::CUSTOM;
  process_group->setBackend(c10::DeviceType::CPU, kCustom, backend);
  if (const auto accelerator = at::getAccelerator()) {
    process_group->setBackend(*accelerator, kCustom, backend);
  }
  process_group->setDefaultBackend(kCustom);
  return process_group;
}

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const CommunicatorPtr& group) {
  std::vector<int> all(group->size());
  std::iota(all.begin(), all.end(), 0);
  return with_backend(c10::make_intrusive<c10d::HashStore>(),
                      make_backend(group->split(all, group->name() + ":c10d"), "smp"));
}

c10::intrusive_ptr<c10d::ProcessGroup> make_smddp_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout) {
  return with_backend(store, make_smddp_backend(store, rank, size, timeout));
}

c10::intrusive_ptr<c10d::ProcessGroup> make_smddp_process_group(std::chrono::milliseconds timeout) {
  const MeetingPlace place = meeting_place();
  const auto store = c10::make_intrusive<c10d::PrefixStore>("smddp", open_torchrun_store(timeout));
  return make_smddp_process_group(store, place.rank, place.size, timeout);
}

}  // namespace smp::comm
