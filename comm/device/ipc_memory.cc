// SPDX-License-Identifier: Apache-2.0
#include "comm/device/ipc_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <utility>

namespace smp::comm {
namespace {

/// The first handle of an offer.
struct OfferHead {
  int64_t number;
  int64_t bytes;
  ProcessId process;   // that has made it
  uint64_t closed_id;  // the memory that tells it of the end
  int32_t closed_fd;
};
static_assert(sizeof(OfferHead) <= sizeof(IpcHandle) && std::is_trivially_copyable_v<OfferHead>);

OfferHead head_of(const std::vector<IpcHandle>& offer) {
  OfferHead head;
  std::memcpy(&head, offer[0].data(), sizeof head);
  return head;
}

constexpr size_t kClosedBytes = SharedMemory::kReserved + sizeof(std::atomic<uint32_t>);

std::atomic<uint32_t>& closed_count(const SharedMemory& memory) {
  return *reinterpret_cast<std::atomic<uint32_t>*>(memory.data() + SharedMemory::kReserved);
}

/// Not destroyed at the process's end, when devices are gone too.
struct Retired {
  std::mutex mutex;
  std::vector<std::unique_ptr<MadeMemory>> memories;

  static Retired& get() {
    static auto& retired = *new Retired;
    return retired;
  }
};

/// That of threads is libtorch's, which counts it.
void count(DeviceIpc& ipc, const at::Tensor& memory, int sign) {
  if (&ipc != device_ipc(memory.device().type())) return;
  count_shared(memory.device(), sign * static_cast<int64_t>(memory.storage().nbytes()));
}

}  // namespace

bool are_done(const IpcEvents& events, size_t count) {
  try {
    return std::all_of(events.begin(), events.begin() + static_cast<int64_t>(count),
                       [](const auto& event) { return event->query(); });
  } catch (const c10::Error&) {
    return true;  // the device has failed, and uses nothing any more
  }
}

MadeMemory::MadeMemory(DeviceIpc& ipc, at::Device device, int64_t bytes, int openers, size_t events)
    : ipc_(ipc),
      openers_(openers),
      closed_(SharedMemory::create(kClosedBytes)),
      bytes_(ipc.make_memory(device, bytes)) {
  while (events_.size() < events) {
    events_.push_back(ipc.make_event(device));
  }
  count(ipc_, bytes_, 1);
}

MadeMemory::~MadeMemory() { count(ipc_, bytes_, -1); }

std::vector<IpcHandle> MadeMemory::offer(int64_t number) const {
  const OfferHead head = {number, bytes_.numel(), this_process(), closed_->id(), closed_->fd()};
  std::vector<IpcHandle> handles = {IpcHandle{}, ipc_.handle_of(bytes_)};
  std::memcpy(handles[0].data(), &head, sizeof head);
  for (const auto& event : events_) {
    handles.push_back(event->handle());
  }
  return handles;
}

bool MadeMemory::is_closed() const {
  return closed_count(*closed_).load(std::memory_order_acquire) == openers_;
}

void RetireMemory::operator()(MadeMemory* memory) const {
  const std::lock_guard<std::mutex> lock(Retired::get().mutex);
  Retired::get().memories.emplace_back(memory);
}

void free_closed_memory() {
  std::vector<std::unique_ptr<MadeMemory>> closed;  // freed without the lock
  const std::lock_guard<std::mutex> lock(Retired::get().mutex);
  auto& retired = Retired::get().memories;
  const auto open = std::partition(retired.begin(), retired.end(),
                                   [](const auto& memory) { return !memory->is_closed(); });
  closed.assign(std::make_move_iterator(open), std::make_move_iterator(retired.end()));
  retired.erase(open, retired.end());
}

OpenedMemory::OpenedMemory(DeviceIpc& ipc, at::Device device, const std::vector<IpcHandle>& offer) {
  const OfferHead head = head_of(offer);
  closed_ = open_memory_of(head.process, head.closed_fd, head.closed_id, kClosedBytes);
  TORCH_CHECK(closed_ != nullptr, "memory of process ", head.process.pid,
              " that tells of closing cannot be mapped");
  bytes_ = ipc.open_memory(offer[1], device, head.bytes);
  for (size_t i = 2; i < offer.size(); ++i) {
    events_.push_back(ipc.open_event(offer[i], device));
  }
}

OpenedMemory::~OpenedMemory() {
  bytes_.reset();
  events_.clear();
  closed_count(*closed_).fetch_add(1, std::memory_order_release);
}

int64_t number_in(const std::vector<IpcHandle>& offer) { return head_of(offer).number; }

}  // namespace smp::comm
