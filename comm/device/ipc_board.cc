// SPDX-License-Identifier: Apache-2.0
#include "comm/device/ipc_board.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/device_streams.h"

namespace smp::comm {
namespace {

constexpr size_t kWritten = 0, kRead = 2;  // where the events of slots begin
constexpr size_t kEvents = 4;

// Whether a stream of another device has copied from there, or that has failed.
bool is_done(const c10::Stream& stream) {
  try {
    return c10::impl::VirtualGuardImpl(stream.device_type()).queryStream(stream);
  } catch (const c10::Error&) {
    return true;
  }
}

using Offer = std::vector<IpcHandle>;

std::vector<Offer> all_gather_offers(CollectiveTurn& turn, const Offer& own, int ranks) {
  const auto bytes = static_cast<int64_t>(own.size() * sizeof(IpcHandle));
  const at::Tensor all = at::empty({ranks, bytes}, at::kByte), mine = at::empty({bytes}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), own.data(), mine.nbytes());
  turn.all_gather(all, mine);
  std::vector<Offer> offers(ranks, Offer(own.size()));
  for (int rank = 0; rank < ranks; ++rank) {
    std::memcpy(offers[rank].data(), all[rank].const_data_ptr(), mine.nbytes());
  }
  return offers;
}

}  // namespace

IpcBoard::IpcBoard(CollectiveTurn& turn, DeviceIpc& ipc, at::Device device, int rank, int ranks,
                   int64_t slot_bytes)
    : device_(device), rank_(rank), slot_bytes_(slot_bytes), others_(ranks), parts_(ranks) {
  const c10::InferenceMode normal(false);  // the memory is for later callers, too
  free_closed_memory();
  own_.reset(new MadeMemory(ipc, device, kSlots * slot_bytes, ranks - 1, kEvents));
  for (const auto& event : own_->events()) {
    event->record(current_stream(device));  // nothing is written or read yet
  }
  const std::vector<Offer> offers = all_gather_offers(turn, own_->offer(slot_bytes), ranks);
  for (int one = 0; one < ranks; ++one) {
    if (one != rank) others_[one] = std::make_unique<OpenedMemory>(ipc, device, offers[one]);
    const at::Tensor& bytes = one == rank ? own_->bytes() : others_[one]->bytes();
    const IpcEvents& events = one == rank ? own_->events() : others_[one]->events();
    parts_[one] = {bytes.view({kSlots, slot_bytes}), &events};
  }
}

IpcBoard::~IpcBoard() {
  parts_.clear();
  if (!is_idle()) {
    new auto(std::move(others_));
    static_cast<void>(own_.release());
  }
  others_.clear();
  own_.reset();
  free_closed_memory();
}

int64_t IpcBoard::step(CollectiveTurn& turn, const Collective& call, const Write& write,
                       const Read& read) {
  slot_ = (slot_ + 1) % kSlots;
  const c10::Stream stream = current_stream(device_);
  const Part& own = parts_[rank_];
  for (const Part& part : parts_) {
    (*part.events)[kRead + slot_]->block(stream);
  }
  const auto record = [&](size_t event) { (*own.events)[event + slot_]->record(stream); };
  run_finally(
      [&] {
        if (write) write(own.slots[slot_]);
      },
      [&] { record(kWritten); });
  const int64_t longest = turn.meet(call);
  run_finally(
      [&] {
        if (read) read();
      },
      [&] { record(kRead); });
  return longest;
}

// Memory of another device is copied on a stream of that, as comm/hand_over.cc does and why.
at::Tensor IpcBoard::read(int rank, int64_t begin, int64_t bytes) {
  const Part& part = parts_[rank];
  const at::Tensor theirs = part.slots[slot_].narrow(0, begin, bytes);
  const bool is_elsewhere = theirs.device() != device_;
  const c10::Stream stream = is_elsewhere ? stream_of(theirs.device()) : current_stream(device_);
  (*part.events)[kWritten + slot_]->block(stream);
  if (!is_elsewhere) return theirs;
  const at::Tensor copy = at::empty({bytes}, at::TensorOptions(at::kByte).device(device_));
  const c10::StreamGuard guard(stream);
  copy.copy_(theirs, /*non_blocking=*/true);
  return copy;
}

c10::Stream IpcBoard::stream_of(at::Device device) {
  const auto found = side_.find(device.index());
  return found != side_.end() ? found->second
                              : side_.emplace(device.index(), side_stream(device)).first->second;
}

bool IpcBoard::is_idle() const {
  return are_done(own_->events(), kEvents) &&
         std::all_of(side_.begin(), side_.end(),
                     [](const auto& side) { return is_done(side.second); });
}

}  // namespace smp::comm
