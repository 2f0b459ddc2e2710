// SPDX-License-Identifier: Apache-2.0
#include "core/stop_request.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "core/check.h"
#include "core/env.h"
#include "core/failure.h"

namespace smp::core {
namespace {

constexpr const char* kAsked = "/stop";         // written by the launcher
constexpr const char* kStopping = "/stopping";  // written by rank 0

// All that the handler reads and writes.
struct Handling {
  std::atomic<bool> requested{false};
  std::atomic<pid_t> process{0};
  timer_t timer{};
  itimerspec grace{};
};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<pid_t>::is_always_lock_free);

Handling& handling() {
  static auto* const one = new Handling();  // signals come after static objects have ended, too
  return *one;
}

/// The signal that is handled waits until the handler has returned.
void end_by(int signal_number) {
  ::signal(signal_number, SIG_DFL);
  ::raise(signal_number);
}

void on_terminate(int signal_number, siginfo_t* info, void* /*context*/) {
  const int error = errno;
  Handling& own = handling();
  const bool is_over = info->si_code == SI_TIMER;
  if (is_over || getpid() != own.process) {
    end_by(signal_number);
  } else if (!own.requested.exchange(true)) {
    timer_settime(own.timer, 0, &own.grace, nullptr);
  }
  errno = error;
}

/// Sends this process SIGTERM when it is over.
timer_t make_timer() {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGTERM;
  timer_t timer{};
  SMP_INTERNAL_ASSERT(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0, std::strerror(errno));
  return timer;
}

bool exists(const std::string& directory, const char* name) {
  return ::access((directory + name).c_str(), F_OK) == 0;
}

}  // namespace

void take_stop_requests(std::chrono::nanoseconds grace) {
  Handling& own = handling();
  if (own.process != getpid()) own.timer = make_timer();  // a forked process has none
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(grace);
  own.grace.it_value.tv_sec = seconds.count();
  own.grace.it_value.tv_nsec = (grace - seconds).count();
  own.process = getpid();
  struct sigaction action {};
  action.sa_sigaction = &on_terminate;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigemptyset(&action.sa_mask);
  SMP_INTERNAL_ASSERT(sigaction(SIGTERM, &action, nullptr) == 0, std::strerror(errno));
}

bool stop_is_requested() {
  if (handling().requested) return true;
  const auto directory = env(kFailureDirVariable);
  return directory && exists(*directory, kAsked);
}

void set_stop_requested(bool requested) { handling().requested = requested; }

bool ask_to_stop(const std::string& directory) {
  return std::ofstream(directory + kAsked).put('\n').flush().good();
}

void note_stopping() noexcept {
  try {
    if (const auto directory = env(kFailureDirVariable)) {
      std::ofstream(*directory + kStopping).put('\n').flush();
    }
  } catch (...) {
    // The launcher then reports the job like any other.
  }
}

bool is_stopping(const std::string& directory) { return exists(directory, kStopping); }

}  // namespace smp::core
