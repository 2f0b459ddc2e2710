// SPDX-License-Identifier: Apache-2.0
#include "comm/device/ipc_ring.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "comm/host_parts.h"
#include "core/check.h"

namespace smp::comm {
namespace {

constexpr int64_t kSlotAlignment = 256;  // more than any kernel asks for

/// The sender may always send `ahead` messages, and the receiver may be copying one.
size_t slots_of(const ChannelSpec& spec) { return static_cast<size_t>(spec.ahead) + 1; }

int64_t slot_bytes(const ChannelSpec& spec) {
  return (element_bytes(spec) + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

at::Tensor in_slots(const at::Tensor& memory, const ChannelSpec& spec) {
  return memory.view({static_cast<int64_t>(slots_of(spec)), slot_bytes(spec)});
}

int64_t ring_bytes(const ChannelSpec& spec) {
  return static_cast<int64_t>(slots_of(spec)) * slot_bytes(spec);
}

/// The first `count` of so many events in turn.
size_t recorded(const IpcEvents& events, uint64_t count) {
  return static_cast<size_t>(std::min<uint64_t>(count, events.size()));
}

}  // namespace

size_t handles_asked(const ChannelSpec& spec) { return slots_of(spec); }
size_t handles_offered(const ChannelSpec& spec) { return offer_size(slots_of(spec)); }

SentRing::SentRing(DeviceIpc& ipc, const ChannelSpec& spec, const std::vector<IpcHandle>& asked)
    : spec_(spec),
      memory_(new MadeMemory(ipc, spec.device, ring_bytes(spec), /*openers=*/1, slots_of(spec))),
      slots_(in_slots(memory_->bytes(), spec)) {
  for (const IpcHandle& handle : asked) {
    taken_.push_back(ipc.open_event(handle, spec.device));
  }
}

std::vector<IpcHandle> SentRing::offer() { return memory_->offer(element_bytes(spec_)); }

at::Tensor SentRing::take(int64_t bytes, const c10::Stream& stream) {
  const size_t slot = sent_ % taken_.size();
  if (sent_ >= taken_.size()) {
    taken_[slot]->block(stream);
  }
  return slots_[static_cast<int64_t>(slot)].narrow(0, 0, bytes);
}

void SentRing::send(const c10::Stream& stream) {
  memory_->events()[sent_++ % taken_.size()]->record(stream);
}

bool SentRing::is_idle() const {
  return are_done(memory_->events(), recorded(memory_->events(), sent_));
}

ReceivedRing::ReceivedRing(DeviceIpc& ipc, const ChannelSpec& spec) : ipc_(ipc), spec_(spec) {
  while (taken_.size() < slots_of(spec)) {
    taken_.push_back(ipc.make_event(spec.device));
  }
}

bool ReceivedRing::is_idle() const { return are_done(taken_, recorded(taken_, received_)); }

std::vector<IpcHandle> ReceivedRing::ask() {
  std::vector<IpcHandle> handles;
  for (const auto& event : taken_) {
    handles.push_back(event->handle());
  }
  return handles;
}

void ReceivedRing::open(const std::vector<IpcHandle>& offered, const std::string& group) {
  const int64_t bytes = element_bytes(spec_), theirs = number_in(offered);
  SMP_CHECK_WITH(CommError, theirs == bytes, "open_channels on group '", group,
                 "': the channel with tag ", spec_.tag, " is one of ", bytes, " bytes on ",
                 spec_.device, " for its receiver, and one of ", theirs,
                 " for its sender. Both must give the same numbers.");
  memory_ = std::make_unique<OpenedMemory>(ipc_, spec_.device, offered);
  slots_ = in_slots(memory_->bytes(), spec_);
}

void ReceivedRing::receive(const at::Tensor& elements, const c10::Stream& stream) {
  const size_t slot = received_ % taken_.size();
  memory_->events()[slot]->block(stream);
  const c10::StreamGuard guard(stream);
  elements.copy_(slots_[static_cast<int64_t>(slot)].narrow(0, 0, elements.numel()),
                 /*non_blocking=*/true);
  taken_[slot]->record(stream);
  ++received_;
}

}  // namespace smp::comm
