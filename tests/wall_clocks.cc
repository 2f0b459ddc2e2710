// SPDX-License-Identifier: Apache-2.0
// A library to preload: the wall clock of each process is off by other hours, as where hosts do not
// agree, and steps two hours back and forth from call to call. The clocks that only go on do.

#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <ctime>

namespace {

constexpr time_t kHour = 3600;

time_t offset() {
  static std::atomic<unsigned> calls{0};
  return kHour * (getpid() % 11 - 5 - (calls++ % 2 == 0 ? 2 : 0));
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, now));
  const bool is_wall_clock = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (result == 0 && is_wall_clock) now->tv_sec += offset();
  return result;
}

int gettimeofday(timeval* __restrict now, void* __restrict zone) noexcept {
  const auto result = static_cast<int>(syscall(SYS_gettimeofday, now, zone));
  if (result == 0) now->tv_sec += offset();
  return result;
}

time_t time(time_t* now) noexcept {
  timespec exact = {};
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now != nullptr) *now = exact.tv_sec;
  return exact.tv_sec;
}

}  // extern "C"
