#include "comm/shm/slot_queue.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <ctime>

namespace smp::comm {

// Atomics that need a lock would keep it in one of the processes.
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

struct SlotQueue::Shared {
  alignas(64) std::atomic<uint32_t> pushed;  // the futex
  std::atomic<uint32_t> sleepers;
};

namespace {

// Not FUTEX_PRIVATE_FLAG: the other end may be another process. A wake that is spurious, early or
// interrupted is one more look at the queue.
void futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

// A power of two, so that numbers of entries that wrap around stay in step with it.
uint32_t entries_for(uint32_t capacity) {
  uint32_t entries = 1;
  while (entries < capacity) {
    entries *= 2;
  }
  return entries;
}

timespec to_timespec(std::chrono::nanoseconds time) {
  constexpr int64_t kSecond = 1'000'000'000;
  return {static_cast<time_t>(time.count() / kSecond), static_cast<long>(time.count() % kSecond)};
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

void SlotQueue::push(uint32_t slot) {
  const uint32_t pushed = shared_->pushed.load(std::memory_order_relaxed);
  entry(pushed) = slot;
  shared_->pushed.store(pushed + 1, std::memory_order_seq_cst);
  if (shared_->sleepers.load(std::memory_order_seq_cst) > 0) {
    futex(&shared_->pushed, FUTEX_WAKE, 1, nullptr);
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
    const timespec timeout = to_timespec(at_most);
    futex(&shared_->pushed, FUTEX_WAIT, popped_, &timeout);
  }
  shared_->sleepers.store(0, std::memory_order_relaxed);
}

}  // namespace smp::comm
