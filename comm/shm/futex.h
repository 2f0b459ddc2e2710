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

// Not FUTEX_PRIVATE_FLAG: the others may be other processes. A wake that is spurious, early or
// interrupted is one more look at what is waited for.

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

/// How long a wait looks again, where there is a core for each rank, before it sleeps: about what
/// it costs both sides when one sleeps and must be woken.
constexpr std::chrono::microseconds kSpin{30};

/// A sleeping rank looks this often whether the others are still there.
constexpr std::chrono::milliseconds kLookAround{100};

}  // namespace smp::comm
