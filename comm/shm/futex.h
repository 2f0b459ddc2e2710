// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace smp::comm {

// Atomics that need a lock would keep it in one of the processes.
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);

/// The half of a 64-bit counter that changes, since the kernel's words have 32 bits. A wait that
/// misses exactly 2^32 steps sleeps until its time-out.
inline std::atomic<uint32_t>& low_half(std::atomic<uint64_t>& counter) {
  constexpr int kHalf = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 0 : 1;
  return reinterpret_cast<std::atomic<uint32_t>*>(&counter)[kHalf];
}

// Not FUTEX_PRIVATE_FLAG: the others may be other processes. A wake that is spurious, early or
// interrupted is one more look at the awaited number.

/// Sleeps while `word` has this value, at most so long.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t value,
                       std::chrono::nanoseconds at_most) {
  constexpr int64_t kSecond = 1'000'000'000;
  const timespec timeout{static_cast<time_t>(at_most.count() / kSecond),
                         static_cast<long>(at_most.count() % kSecond)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &timeout, nullptr, 0);
}

/// Wakes all that sleep on `word`.
inline void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Tells the core that this is a loop that waits.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

/// How long a wait looks again, where there is a core for each rank, before it sleeps: about the
/// cost for both sides when one sleeps and must be woken.
constexpr std::chrono::microseconds kSpin{30};

/// A sleeping rank looks this often whether the others are still there.
constexpr std::chrono::milliseconds kLookAround{100};

}  // namespace smp::comm
