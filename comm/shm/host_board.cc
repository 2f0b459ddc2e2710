// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/host_board.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "comm/shm/futex.h"
#include "core/check.h"
#include "core/wait_watch.h"

namespace smp::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLine = 64;
constexpr Clock::duration kNow{0};

// How often a rank polls before it gives its core away: some microseconds, since in a collective of
// ranks in step the others come that soon.
constexpr int kPolls = 200;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Where things are in the part of one rank: two records, the counters of steps, and for each record
// the caller, the splits and the eager data; then the buffers.
struct PartLayout {
  explicit PartLayout(int group_size)
      : splits_bytes(round_up(2 * group_size * sizeof(int64_t), kLine)) {}

  size_t record(uint64_t number) const { return number % 2 * kLine; }
  size_t steps() const { return 2 * kLine; }
  size_t caller(uint64_t number) const { return 4 * kLine + number % 2 * sizeof(core::PublicCall); }
  size_t splits(uint64_t number) const { return caller(0) + kCallers + number % 2 * splits_bytes; }
  size_t eager_data(uint64_t number) const {
    return splits(0) + 2 * splits_bytes + number % 2 * HostBoard::kEagerBytes;
  }
  size_t buffers() const { return eager_data(0) + 2 * HostBoard::kEagerBytes; }
  size_t total(bool with_buffers) const {
    const size_t room = with_buffers ? HostBoard::kBuffers * HostBoard::kBufferBytes : 0;
    return round_up(buffers() + room, 4096);
  }

  static constexpr size_t kCallers = 2 * sizeof(core::PublicCall);
  static_assert(kCallers % kLine == 0);

  size_t splits_bytes;
};

}  // namespace

struct HostBoard::Steps {
  alignas(kLine) Counter staged;
  Counter reduced;
  Counter done;
  alignas(kLine) std::atomic<uint32_t> sleepers;  // ranks that sleep on a counter of this one
};

size_t HostBoard::bytes(int ranks, int group_size, bool with_buffers) {
  return SharedMemory::kReserved + ranks * PartLayout(group_size).total(with_buffers);
}

HostBoard::HostBoard(std::shared_ptr<Transport> transport, std::shared_ptr<const GroupState> group,
                     const HostLayout& layout, std::shared_ptr<SharedMemory> memory)
    : transport_(std::move(transport)),
      group_(std::move(group)),
      group_ranks_(layout.local()),
      rank_(layout.local_rank),
      memory_(std::move(memory)),
      part_bytes_((memory_->size() - SharedMemory::kReserved) / group_ranks_.size()),
      may_spin_(transport_->has_core_for_each_rank()) {
  for (const int rank : group_ranks_) {
    processes_.emplace_back(layout.processes[rank]);
  }
}

void HostBoard::begin(const OperationInfo& info, const Deadline& deadline) {
  info_ = info;
  deadline_ = &deadline;
  check_abort(*transport_, *group_, info_);
}

HostBoard::Steps& HostBoard::steps(int rank) const {
  return *reinterpret_cast<Steps*>(part(rank) + PartLayout(group_->size).steps());
}

CallRecord& HostBoard::record_of(int rank, uint64_t number) const {
  return *reinterpret_cast<CallRecord*>(part(rank) + PartLayout(group_->size).record(number));
}

CallRecord& HostBoard::next_record(const Signature& call) {
  if (!all_have_entered_) {
    await_records();
  }
  all_have_entered_ = false;
  CallRecord& record = record_of(rank_, ++entered_);
  record.call = call;
  caller(rank_) = core::this_public_call();
  record.caller_kind = caller(rank_).kind();
  return record;
}

void HostBoard::publish_record() { signal(call_progress(), entered_); }

void HostBoard::await_records() {
  await_all(call_progress(), entered_);
  all_have_entered_ = true;
}

void HostBoard::check_same_calls(const OperationInfo& info) const {
  const CallRecord& own = record(rank_);
  for (int rank = 0; rank < ranks(); ++rank) {
    const CallRecord& one = record(rank);
    if (!(one.call == own.call) || one.caller_kind != own.caller_kind) {
      fail_mismatch(info);
    }
  }
}

void HostBoard::fail_mismatch(const OperationInfo& info) const {
  std::vector<Call> calls;
  for (int rank = 0; rank < ranks(); ++rank) {
    calls.push_back({record(rank).call, caller(rank)});
  }
  core::fail<CommError>(describe(info), " does not match the other ranks' calls: ",
                        mismatch_text(group_->in_world(group_ranks_), calls));
}

const CallRecord& HostBoard::record(int rank) const { return record_of(rank, entered_); }

core::PublicCall& HostBoard::caller(int rank) const {
  return *reinterpret_cast<core::PublicCall*>(part(rank) +
                                              PartLayout(group_->size).caller(entered_));
}

std::byte* HostBoard::eager_data(int rank) const {
  return part(rank) + PartLayout(group_->size).eager_data(entered_);
}

int64_t* HostBoard::splits(int rank) const {
  return reinterpret_cast<int64_t*>(part(rank) + PartLayout(group_->size).splits(entered_));
}

std::byte* HostBoard::buffer(int rank, uint64_t step) const {
  return part(rank) + PartLayout(group_->size).buffers() + step % kBuffers * kBufferBytes;
}

HostBoard::Counter& HostBoard::counter(Progress progress, int rank) const {
  switch (progress) {
    case Progress::kEvenCall:
      return record_of(rank, 0).number;
    case Progress::kOddCall:
      return record_of(rank, 1).number;
    case Progress::kStaged:
      return steps(rank).staged;
    case Progress::kReduced:
      return steps(rank).reduced;
    case Progress::kDone:
      break;
  }
  return steps(rank).done;
}

void HostBoard::await_all(Progress progress, uint64_t number) const {
  for (int rank = 0; rank < ranks(); ++rank) {
    await(progress, number, rank);
  }
}

uint64_t HostBoard::take_steps(uint64_t count) {
  const uint64_t first = next_step_;
  next_step_ += count;
  return first;
}

// Both orders, here and in sleep_until, are sequentially consistent, so that either the sleeper is
// seen or the counter is; no wake is lost.
void HostBoard::signal(Progress progress, uint64_t number) {
  Counter& own = counter(progress, rank_);
  own.store(number, std::memory_order_seq_cst);
  if (steps(rank_).sleepers.load(std::memory_order_seq_cst) > 0) {
    futex_wake(low_half(own));
  }
}

void HostBoard::await(Progress progress, uint64_t number, int rank) const {
  Counter& theirs = counter(progress, rank);
  const auto ready = [&] { return theirs.load(std::memory_order_acquire) >= number; };
  if (rank == rank_ || ready()) {
    return;
  }
  for (int i = 0; may_spin_ && i < kPolls; ++i) {
    if (ready()) {
      return;
    }
    relax();
  }
  // The other may have been put on this rank's core, or there are more ranks than cores.
  const Clock::time_point end = Clock::now() + kSpin;
  do {
    sched_yield();
    if (ready()) {
      return;
    }
  } while (Clock::now() < end);
  sleep_until(progress, number, rank);
}

void HostBoard::sleep_until(Progress progress, uint64_t number, int rank) const {
  Counter& theirs = counter(progress, rank);
  std::atomic<uint32_t>& sleepers = steps(rank).sleepers;
  core::WaitWatch watch;
  while (true) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t current = theirs.load(std::memory_order_seq_cst);
    if (current < number) {
      const Clock::duration left = deadline_->get() - Clock::now();
      futex_wait(low_half(theirs), static_cast<uint32_t>(current),
                 std::clamp<Clock::duration>(left, kNow, kLookAround));
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (theirs.load(std::memory_order_acquire) >= number) {
      return;
    }
    check_abort(*transport_, *group_, info_, missing(progress, number));
    check_alive(progress, number);
    watch.look(info_.verb, group_->in_world(missing(progress, number)));
    if (Clock::now() >= deadline_->get()) {
      fail_timeout(*group_, info_, missing(progress, number));
    }
  }
}

// A rank may have announced the awaited step and then ended.
void HostBoard::check_alive(Progress progress, uint64_t number) const {
  for (int peer = 0; peer < ranks(); ++peer) {
    if (processes_[peer].ended() &&
        counter(progress, peer).load(std::memory_order_acquire) < number) {
      fail_ended(*group_, info_, group_ranks_[peer]);
    }
  }
}

// The ranks of the group that have not come so far.
std::vector<int> HostBoard::missing(Progress progress, uint64_t number) const {
  std::vector<int> late;
  for (int rank = 0; rank < ranks(); ++rank) {
    if (rank != rank_ && counter(progress, rank).load(std::memory_order_acquire) < number) {
      late.push_back(group_ranks_[rank]);
    }
  }
  return late;
}

}  // namespace smp::comm
