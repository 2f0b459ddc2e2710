// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/shared_channel.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/shm/futex.h"
#include "core/check.h"
#include "core/wait_watch.h"

namespace smp::comm {
namespace {

using Clock = Transport::Clock;

constexpr size_t kSlotAlignment = 64;

/// A message of this many bytes is announced before it is written, for being woken takes as long as
/// writing several hundred KiB. Shorter ones are there as soon.
constexpr int64_t kWorthAnnouncing = 32 << 10;

/// How long to look for a message that is announced.
constexpr std::chrono::milliseconds kSpinForAnnounced{1};

void pin_for(const ChannelSpec& spec, SharedMemory& memory) {
  if (spec.device.is_cuda()) {
    memory.pin(spec.device.index());
  }
}

std::optional<uint32_t> spin(SlotQueue& queue, Clock::duration at_most) {
  const Clock::time_point end = Clock::now() + at_most;
  do {
    for (int i = 0; i < 32; ++i) {
      if (const auto slot = queue.try_pop()) {
        return slot;
      }
      relax();
    }
  } while (Clock::now() < end);
  return std::nullopt;
}

class SharedSender final : public Sender {
 public:
  SharedSender(std::shared_ptr<SharedMemory> memory, const ChannelSpec& spec, PeerWait wait)
      : memory_(std::move(memory)), bytes_(spec.bytes), wait_(std::move(wait)), layout_(spec) {
    for (uint32_t slot = 0; slot < layout_.slots(); ++slot) {
      free_.push_back(layout_.slots() - 1 - slot);
    }
    make_messages();
  }

  void set_size(const MessageSize& size) override {
    if (size.bytes == bytes_) {
      return;
    }
    bytes_ = size.bytes;
    wait_.set_bytes(bytes_);
    make_messages();
  }

  const at::Tensor& prepare() override {
    if (!next_) {
      next_ = take_slot();
      if (bytes_ >= kWorthAnnouncing) {
        sent_queue_.announce();
      }
    }
    return messages_[*next_];
  }

  void send() override {
    SMP_INTERNAL_ASSERT(next_.has_value(), "send without prepare");
    sent_queue_.push(*next_);
    next_.reset();
  }

  void flush() override {}

 private:
  void make_messages() {
    messages_.clear();
    for (uint32_t slot = 0; slot < layout_.slots(); ++slot) {
      messages_.push_back(at::from_blob(
          memory_->data() + layout_.slot(slot), {bytes_}, [memory = memory_](void*) {},
          at::TensorOptions(at::kByte)));
    }
  }

  // The one that came back last, whose memory is most likely in a cache.
  uint32_t take_slot() {
    while (const auto slot = free_queue_.try_pop()) {
      free_.push_back(*slot);
    }
    if (free_.empty()) {
      return wait_.pop(free_queue_);
    }
    const uint32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }

  const std::shared_ptr<SharedMemory> memory_;
  int64_t bytes_;
  PeerWait wait_;
  const SharedLayout layout_;
  SlotQueue sent_queue_{memory_->data() + layout_.sent_queue(), layout_.slots()};
  SlotQueue free_queue_{memory_->data() + layout_.free_queue(), layout_.slots()};
  std::vector<at::Tensor> messages_;  // messages by slot
  std::vector<uint32_t> free_;
  std::optional<uint32_t> next_;
};

// Where received tensors leave their slots. They share it, so that it lives as long as they do.
class SlotReturn {
 public:
  SlotReturn(std::shared_ptr<SharedMemory> memory, const SharedLayout& layout)
      : memory_(std::move(memory)),
        free_queue_(memory_->data() + layout.free_queue(), layout.slots()) {}

  // False when as many are held already.
  bool hold(int at_most) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (held_ == at_most) {
      return false;
    }
    ++held_;
    return true;
  }

  void give_back(uint32_t slot, bool was_held) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ -= was_held ? 1 : 0;
    free_queue_.push(slot);
  }

 private:
  const std::shared_ptr<SharedMemory> memory_;
  std::mutex mutex_;  // tensors die on any thread
  SlotQueue free_queue_;
  int held_ = 0;
};

class SharedReceiver final : public Receiver {
 public:
  SharedReceiver(std::shared_ptr<SharedMemory> memory, const ChannelSpec& spec, PeerWait wait)
      : memory_(std::move(memory)),
        wait_(std::move(wait)),
        held_(spec.held),
        bytes_(spec.bytes),
        layout_(spec),
        slot_return_(std::make_shared<SlotReturn>(memory_, layout_)) {}

  void set_size(const MessageSize& size) override {
    bytes_ = size.bytes;
    wait_.set_bytes(bytes_);
  }

  void expect(int /*messages*/) override {}  // messages move without help

  bool has_arrived() override { return sent_queue_.has_next(); }

  at::Tensor receive() override {
    const uint32_t slot = wait_.pop(sent_queue_);
    if (slot_return_->hold(held_)) {
      return on_slot(slot, [slots = slot_return_, slot](void*) { slots->give_back(slot, true); });
    }
    // The sender counts on the rest of the slots.
    at::Tensor copy = on_slot(slot, [](void*) {}).clone();
    slot_return_->give_back(slot, false);
    return copy;
  }

 private:
  at::Tensor on_slot(uint32_t slot, const std::function<void(void*)>& deleter) const {
    return at::from_blob(memory_->data() + layout_.slot(slot), {bytes_}, deleter,
                         at::TensorOptions(at::kByte));
  }

  const std::shared_ptr<SharedMemory> memory_;
  PeerWait wait_;
  const int held_;
  int64_t bytes_;
  const SharedLayout layout_;
  SlotQueue sent_queue_{memory_->data() + layout_.sent_queue(), layout_.slots()};
  const std::shared_ptr<SlotReturn> slot_return_;
};

}  // namespace

SharedLayout::SharedLayout(const ChannelSpec& spec)
    : slots_(static_cast<uint32_t>(spec.held + spec.ahead)),
      slot_bytes_((static_cast<size_t>(spec.bytes) + kSlotAlignment - 1) / kSlotAlignment *
                  kSlotAlignment) {}

PeerWait::PeerWait(std::shared_ptr<Transport> transport, std::shared_ptr<const GroupState> group,
                   const char* verb, const ChannelSpec& spec, ProcessWatch peer)
    : transport_(std::move(transport)),
      group_(std::move(group)),
      info_{verb, static_cast<size_t>(spec.bytes), spec.peer, spec.tag},
      peer_(std::move(peer)) {}

uint32_t PeerWait::pop(SlotQueue& queue) const {
  check_abort(*transport_, *group_, info_);
  auto slot = queue.try_pop();
  const bool spins = transport_->has_core_for_each_rank();
  if (!slot && spins) {
    slot = spin(queue, kSpin);
  }
  const Clock::time_point deadline = Clock::now() + group_->timeout();
  core::WaitWatch watch;
  while (!slot) {
    const Clock::duration left = deadline - Clock::now();
    if (left.count() <= 0) {
      fail_timeout(*group_, info_, {info_.peer});
    }
    if (spins && queue.is_announced()) {
      slot = spin(queue, kSpinForAnnounced);
    }
    if (!slot) {
      queue.sleep(std::min<Clock::duration>(left, kLookAround));
      slot = queue.try_pop();
    }
    if (!slot) {
      check_abort(*transport_, *group_, info_, {info_.peer});
      slot = look_for_peer(queue);
    }
    if (!slot) {
      watch.look(info_.verb, group_->in_world({info_.peer}));
    }
  }
  return *slot;
}

// A peer that has ended may have pushed just before.
std::optional<uint32_t> PeerWait::look_for_peer(SlotQueue& queue) const {
  if (!peer_.ended()) {
    return std::nullopt;
  }
  const auto slot = queue.try_pop();
  if (!slot) {
    fail_ended(*group_, info_, info_.peer);
  }
  return slot;
}

std::unique_ptr<Sender> make_shared_sender(std::shared_ptr<SharedMemory> memory,
                                           const ChannelSpec& spec, PeerWait wait) {
  pin_for(spec, *memory);
  return std::make_unique<SharedSender>(std::move(memory), spec, std::move(wait));
}

std::unique_ptr<Receiver> make_shared_receiver(std::shared_ptr<SharedMemory> memory,
                                               const ChannelSpec& spec, PeerWait wait) {
  pin_for(spec, *memory);
  return std::make_unique<SharedReceiver>(std::move(memory), spec, std::move(wait));
}

}  // namespace smp::comm
