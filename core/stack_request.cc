// SPDX-License-Identifier: Apache-2.0
#include "core/stack_request.h"

#include <errno.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include "core/status.h"
#include "core/status_mapping.h"
#include "core/symbols.h"

namespace smp::core {
namespace {

constexpr int kRequest = SIGURG;

// Where a thread was when a signal came.
void* interrupted_at(const void* context) {
  const auto& registers = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return reinterpret_cast<void*>(registers.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<void*>(registers.pc);
#else
  return nullptr;
#endif
}

// Keeps the two ends of a deep stack, the innermost functions and their outermost callers, as many
// as others can see.
void** without_middle(void** begin, void** end) {
  constexpr int kMost = StatusMemory::Stack::kFrames, kInnermost = kMost / 4;
  if (end - begin <= kMost) return end;
  begin[kInnermost] = nullptr;
  return std::copy(end - (kMost - kInnermost - 1), end, begin + kInnermost + 1);
}

// Runs between any two instructions of the rank's thread: no locks, no memory.
void answer(int /*signal*/, siginfo_t* /*sender*/, void* context) {
  const int error = errno;
  if (Status* const status = this_status()) {
    std::array<void*, 128> frames{};
    const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
    // The first are this function's and those of the code that calls handlers.
    void** const end = frames.data() + count;
    void** const begin = std::find(frames.data(), end, interrupted_at(context));
    status->set_stack(begin, without_middle(begin, end));
  }
  errno = error;
}

std::vector<std::string> stack_of(const JobStatus& job, const RankStatus& one) {
  using std::chrono::milliseconds;
  for (const StatusMapping& mapping : map_statuses(one.process)) {
    const StatusMemory& memory = *mapping.memory;
    if (memory.owner.rank != one.rank || mapping.job_id() != job.id) continue;
    const StatusMemory::Stack& stack = memory.stack;
    const uint32_t before = get(stack.version);
    const bool answers = before != 0;
    if (!answers || syscall(SYS_tgkill, one.process, memory.owner.thread, kRequest) != 0) break;
    const auto deadline = Status::Clock::now() + milliseconds(200);
    const auto has_answered = [&] {
      const uint32_t version = get(stack.version);
      return version != before && version % 2 == 0;
    };
    while (!has_answered() && Status::Clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    if (!has_answered()) break;
    std::vector<uint64_t> addresses;
    read_part(stack, [&] {
      addresses.clear();
      const size_t count = std::min<size_t>(get(stack.count), stack.frames.size());
      for (size_t i = 0; i < count; ++i) addresses.push_back(get(stack.frames[i]));
    });
    return without_plumbing(function_names(one.process, addresses));
  }
  return {};
}

}  // namespace

bool answer_stack_requests() {
  static const bool answers = [] {
    struct sigaction current = {};
    if (sigaction(kRequest, nullptr, &current) != 0) return false;
    if ((current.sa_flags & SA_SIGINFO) != 0 || current.sa_handler != SIG_DFL) return false;
    void* frame = nullptr;
    backtrace(&frame, 1);  // loads its libraries
    struct sigaction ours = {};
    ours.sa_sigaction = answer;
    ours.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    return sigaction(kRequest, &ours, nullptr) == 0;
  }();
  return answers;
}

bool still_answers_stack_requests() {
  struct sigaction current = {};
  return sigaction(kRequest, nullptr, &current) == 0 && (current.sa_flags & SA_SIGINFO) != 0 &&
         current.sa_sigaction == answer;
}

void ask_for_stacks(JobStatus& job) {
  const std::vector<int> causes = causes_of_waits(job);
  for (RankStatus& one : job.ranks) {
    const auto kind = one.state.kind;
    const bool hears = kind == ThreadState::Kind::kComputes || kind == ThreadState::Kind::kSleeps;
    if (hears && std::count(causes.begin(), causes.end(), one.rank) > 0) {
      one.stack = stack_of(job, one);
    }
  }
}

}  // namespace smp::core
