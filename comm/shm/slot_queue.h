// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace smp::comm {

/// A queue of slot numbers in memory that two processes (or threads) share: one end pushes, the
/// other pops and may sleep until there is something.
///
/// The number of pushes, which only grows, is all that synchronises: the pusher writes the entry
/// and then the number with release order; the popper, which keeps the number of pops to itself,
/// reads it with acquire order. So writes before a push are seen after its pop. As no word is ever
/// compared and swapped there is no ABA problem; the 32 bits may wrap around, since only
/// differences below the capacity matter. A process that dies in a push either did it or did not.
///
/// The popper sleeps on a futex on that number, having raised `sleepers` before it looked a last
/// time; the pusher looks at `sleepers` after its push. Both orders are sequentially consistent, so
/// one of the two sees the other, and a wake is never lost. A push that finds no thread asleep
/// makes no system call. An announcement is a hint: nothing but speed depends on it.
class SlotQueue {
 public:
  /// The bytes of memory that a queue takes, a multiple of 64. The owner of the slots sees to it
  /// that there are never more than `capacity` in the queue.
  static size_t bytes(uint32_t capacity);

  /// A view of the queue at `memory`, which starts at a multiple of 64 and is zero when the queue
  /// is new. Each end has its own view.
  SlotQueue(void* memory, uint32_t capacity);

  /// Says that a push will follow as soon as its slot is written, and wakes the popper, so that it
  /// is awake by then. By the thread that pushes.
  void announce();

  /// Called by one thread at a time.
  void push(uint32_t slot);

  /// Whether a push was announced that has not come yet. By the thread that pops.
  bool is_announced() const;

  /// Whether try_pop would give something. By the thread that pops.
  bool has_next() const { return !is_empty(); }

  /// Called by one thread at a time.
  std::optional<uint32_t> try_pop();

  /// Sleeps until something may be there to pop, at most so long. By the thread that pops.
  void sleep(std::chrono::nanoseconds at_most);

 private:
  struct Shared;

  uint32_t& entry(uint32_t number);
  bool is_empty() const;

  Shared* shared_;
  uint32_t entries_;
  uint32_t popped_ = 0;
};

}  // namespace smp::comm
