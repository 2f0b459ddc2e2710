// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/slot_queue.h"

#include <atomic>

#include "comm/shm/futex.h"

namespace smp::comm {

struct SlotQueue::Shared {
  alignas(64) std::atomic<uint32_t> pushed;  // the futex
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> announced;  // pushes, those done included
};

namespace {

// A power of two, so that numbers of entries that wrap around stay in step with it.
uint32_t entries_for(uint32_t capacity) {
  uint32_t entries = 1;
  while (entries < capacity) {
    entries *= 2;
  }
  return entries;
}

}  // namespace

size_t SlotQueue::bytes(uint32_t capacity) {
  const size_t entries = entries_for(capacity) * sizeof(uint32_t);
  return sizeof(Shared) + (entries + 63) / 64 * 64;
}

SlotQueue::SlotQueue(void* memory, uint32_t capacity)
    : shared_(static_cast<Shared*>(memory)), entries_(entries_for(capacity)) {}

uint32_t& SlotQueue::entry(uint32_t number) {
  return reinterpret_cast<uint32_t*>(shared_ + 1)[number % entries_];
}

void SlotQueue::announce() {
  shared_->announced.store(shared_->pushed.load(std::memory_order_relaxed) + 1,
                           std::memory_order_seq_cst);
  if (shared_->sleepers.load(std::memory_order_seq_cst) > 0) {
    futex_wake(shared_->pushed);
  }
}

bool SlotQueue::is_announced() const {
  return shared_->announced.load(std::memory_order_acquire) == popped_ + 1;
}

void SlotQueue::push(uint32_t slot) {
  const uint32_t pushed = shared_->pushed.load(std::memory_order_relaxed);
  entry(pushed) = slot;
  shared_->pushed.store(pushed + 1, std::memory_order_seq_cst);
  if (shared_->sleepers.load(std::memory_order_seq_cst) > 0) {
    futex_wake(shared_->pushed);
  }
}

bool SlotQueue::is_empty() const {
  return shared_->pushed.load(std::memory_order_acquire) == popped_;
}

std::optional<uint32_t> SlotQueue::try_pop() {
  if (is_empty()) {
    return std::nullopt;
  }
  const uint32_t slot = entry(popped_);
  ++popped_;
  return slot;
}

void SlotQueue::sleep(std::chrono::nanoseconds at_most) {
  shared_->sleepers.store(1, std::memory_order_seq_cst);
  if (shared_->pushed.load(std::memory_order_seq_cst) == popped_) {
    futex_wait(shared_->pushed, popped_, at_most);
  }
  shared_->sleepers.store(0, std::memory_order_relaxed);
}

}  // namespace smp::comm
