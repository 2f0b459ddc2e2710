// SPDX-License-Identifier: Apache-2.0
#include "comm/device/ipc_ring.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <utility>

#include "comm/host_parts.h"
#include "core/check.h"

namespace smp::comm {
namespace {

constexpr int64_t kSlotAlignment = 256;  // more than any kernel asks for

/// The first handle of an offer.
struct RingOffer {
  int64_t bytes;       // in the longest message
  ProcessId process;   // that has made it
  uint64_t closed_id;  // the memory that tells it of the end
  int32_t closed_fd;
};
static_assert(sizeof(RingOffer) <= sizeof(IpcHandle) && std::is_trivially_copyable_v<RingOffer>);

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

using Events = std::vector<std::unique_ptr<IpcEvent>>;

/// Whether a device has come to what these events were recorded behind, `count` in turn.
bool are_done(const Events& events, uint64_t count) {
  try {
    return std::all_of(events.begin(),
                       events.begin() + static_cast<int64_t>(std::min(count, events.size())),
                       [](const auto& event) { return event->query(); });
  } catch (const c10::Error&) {
    return true;  // the device has failed, and uses nothing any more
  }
}

constexpr size_t kClosedBytes = SharedMemory::kReserved + sizeof(std::atomic<uint32_t>);

std::atomic<uint32_t>& closed_flag(const SharedMemory& memory) {
  return *reinterpret_cast<std::atomic<uint32_t>*>(memory.data() + SharedMemory::kReserved);
}

/// Rings whose channels are gone. Not destroyed at the process's end, when devices are gone too.
struct RetiredRings {
  std::mutex mutex;
  std::vector<std::unique_ptr<SentRing>> rings;

  static RetiredRings& get() {
    static auto& retired = *new RetiredRings;
    return retired;
  }
};

}  // namespace

size_t handles_asked(const ChannelSpec& spec) { return slots_of(spec); }
size_t handles_offered(const ChannelSpec& spec) { return slots_of(spec) + 2; }

SentRing::SentRing(DeviceIpc& ipc, const ChannelSpec& spec, const std::vector<IpcHandle>& asked)
    : ipc_(ipc),
      spec_(spec),
      closed_(SharedMemory::create(kClosedBytes)),
      memory_(in_slots(ipc.make_memory(spec.device, ring_bytes(spec)), spec)) {
  for (const IpcHandle& handle : asked) {
    taken_.push_back(ipc.open_event(handle, spec.device));
    made_.push_back(ipc.make_event(spec.device));
  }
}

std::vector<IpcHandle> SentRing::offer() {
  const RingOffer first = {element_bytes(spec_), this_process(), closed_->id(), closed_->fd()};
  std::vector<IpcHandle> handles = {IpcHandle{}, ipc_.handle_of(memory_)};
  std::memcpy(handles[0].data(), &first, sizeof first);
  for (const auto& event : made_) {
    handles.push_back(event->handle());
  }
  return handles;
}

at::Tensor SentRing::take(int64_t bytes, const c10::Stream& stream) {
  const size_t slot = sent_ % made_.size();
  if (sent_ >= made_.size()) {
    taken_[slot]->block(stream);
  }
  return memory_[static_cast<int64_t>(slot)].narrow(0, 0, bytes);
}

void SentRing::send(const c10::Stream& stream) { made_[sent_++ % made_.size()]->record(stream); }

bool SentRing::is_idle() const { return are_done(made_, sent_); }

bool SentRing::is_closed() const {
  return closed_flag(*closed_).load(std::memory_order_acquire) != 0;
}

void SentRing::retire(std::unique_ptr<SentRing> ring) {
  RetiredRings& retired = RetiredRings::get();
  const std::lock_guard<std::mutex> lock(retired.mutex);
  retired.rings.push_back(std::move(ring));
}

void SentRing::free_closed() {
  RetiredRings& retired = RetiredRings::get();
  const std::lock_guard<std::mutex> lock(retired.mutex);
  auto& rings = retired.rings;
  rings.erase(std::remove_if(rings.begin(), rings.end(),
                             [](const auto& ring) { return ring->is_closed(); }),
              rings.end());
}

ReceivedRing::ReceivedRing(DeviceIpc& ipc, const ChannelSpec& spec) : ipc_(ipc), spec_(spec) {
  while (taken_.size() < slots_of(spec)) {
    taken_.push_back(ipc.make_event(spec.device));
  }
}

ReceivedRing::~ReceivedRing() {
  memory_.reset();
  made_.clear();
  if (closed_) {
    closed_flag(*closed_).store(1, std::memory_order_release);
  }
}

bool ReceivedRing::is_idle() const { return are_done(taken_, received_); }

std::vector<IpcHandle> ReceivedRing::ask() {
  std::vector<IpcHandle> handles;
  for (const auto& event : taken_) {
    handles.push_back(event->handle());
  }
  return handles;
}

void ReceivedRing::open(const std::vector<IpcHandle>& offered, const std::string& group) {
  RingOffer first;
  std::memcpy(&first, offered[0].data(), sizeof first);
  const int64_t bytes = element_bytes(spec_);
  SMP_CHECK_WITH(CommError, first.bytes == bytes, "open_channels on group '", group,
                 "': the channel with tag ", spec_.tag, " is one of ", bytes, " bytes on ",
                 spec_.device, " for its receiver, and one of ", first.bytes,
                 " for its sender. Both must give the same numbers.");
  closed_ = open_memory_of(first.process, first.closed_fd, first.closed_id, kClosedBytes);
  memory_ = in_slots(ipc_.open_memory(offered[1], spec_.device, ring_bytes(spec_)), spec_);
  for (size_t i = 2; i < offered.size(); ++i) {
    made_.push_back(ipc_.open_event(offered[i], spec_.device));
  }
}

void ReceivedRing::receive(const at::Tensor& elements, const c10::Stream& stream) {
  const size_t slot = received_ % made_.size();
  made_[slot]->block(stream);
  const c10::StreamGuard guard(stream);
  elements.copy_(memory_[static_cast<int64_t>(slot)].narrow(0, 0, elements.numel()),
                 /*non_blocking=*/true);
  taken_[slot]->record(stream);
  ++received_;
}

}  // namespace smp::comm
