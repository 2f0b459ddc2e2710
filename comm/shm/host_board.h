// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/call.h"
#include "comm/deadline.h"
#include "comm/operation.h"
#include "comm/shm/places.h"
#include "comm/shm/share.h"
#include "comm/shm/shared_memory.h"
#include "comm/transport.h"

namespace smp::comm {

/// How data get from rank to rank.
enum class Protocol {
  kEager,      ///< They come with the records of the call.
  kZeroCopy,   ///< Every rank maps all tensors, and reads and writes them where they are.
  kPipelined,  ///< In chunks, through the buffers.
};

/// A rank's word to the others when it enters a collective: its collective, the call of the user's
/// around it, and the places of its tensors.
struct alignas(64) CallRecord {
  std::atomic<uint64_t> number{0};  ///< Number of the collective, from 1; written last.
  Signature call;
  uint64_t caller_kind = 0;  ///< Kind of `HostBoard::caller`, which is read where the kinds differ.
  bool is_eager = false;     ///< Whether the data of this rank's input come with the record.
  uint64_t input_bytes = 0;  ///< 0 where this rank gives nothing.
  Place place;               ///< Place of its input, or of its output where it gives nothing.
};
static_assert(sizeof(CallRecord) == 64);

/// The memory by which the ranks of one host work together on a collective, and the waits on it.
///
/// Every rank has a part that only it writes: a record for every second collective, counters of its
/// progress, room for small data, and buffers through which larger data pass. Every counter only
/// grows (with 64 bits it never wraps around), and is written after the data that it announces
/// (release) and read before it (acquire), so nothing is ever locked.
///
/// A record of collective s is overwritten at s + 2. A rank gets there only when all have entered s
/// + 1, even after a time-out in s + 1, so no rank reads the record of s any more; the same holds
/// for the eager data.
class HostBoard {
 public:
  /// How far a rank is: the counters on which others wait. Numbers of collectives, or of steps,
  /// since the board was made.
  enum class Progress {
    kEvenCall,  ///< It has published its record of the collective, whose number is even.
    kOddCall,   ///< The same of odd ones.
    kStaged,    ///< This rank's input of the step is in its buffer.
    kReduced,   ///< Its part of the result is.
    kDone,      ///< It reads no more from other ranks' buffers of the step.
  };

  /// Bytes that each rank can give with its record.
  static constexpr size_t kEagerBytes = 16 << 10;
  /// Bytes of one buffer, and how many each rank has: one is on its way while another is filled.
  static constexpr size_t kBufferBytes = 64 << 10;
  static constexpr uint64_t kBuffers = 4;

  /// The bytes for so many ranks of one host, of a group of `group_size`. Without buffers where all
  /// ranks are threads of one process, which need none.
  static size_t bytes(int ranks, int group_size, bool with_buffers);

  /// A view of the board by one rank. `memory` is zero when the board is new.
  HostBoard(std::shared_ptr<Transport> transport, std::shared_ptr<const GroupState> group,
            const HostLayout& layout, std::shared_ptr<SharedMemory> memory);

  int ranks() const { return static_cast<int>(group_ranks_.size()); }
  int rank() const { return rank_; }

  /// The rank in the world of one of this host.
  int world_rank(int rank) const { return group_->world_ranks[group_ranks_[rank]]; }

  /// "all_reduce of 8 bytes on group 'world' (here rank 0), ...".
  std::string describe(const OperationInfo& info) const { return comm::describe(*group_, info); }

  /// Says which call the waits are for, from now on. Throws when a rank has aborted.
  void begin(const OperationInfo& info, const Deadline& deadline);

  /// The record of the next collective, with the call and this thread's caller; for this rank to
  /// fill in the rest, then to publish. Waits first if it gave up waiting for the others' records
  /// before.
  CallRecord& next_record(const Signature& call);
  void publish_record();

  /// Waits until all ranks have published theirs.
  void await_records();

  /// Throws a `CommError` that says which rank made which call, unless all have made the same call.
  /// All ranks see the same records, so that all throw or none.
  void check_same_calls(const OperationInfo& info) const;

  // Data of the collective entered last:
  const CallRecord& record(int rank) const;
  core::PublicCall& caller(int rank) const;
  std::byte* eager_data(int rank) const;
  int64_t* splits(int rank) const;  ///< Room for 2 * group_size numbers.

  std::byte* buffer(int rank, uint64_t step) const;

  /// Says that this rank has come so far in the collective or step of this number.
  void signal(Progress progress, uint64_t number);
  /// Waits until rank, or all ranks, have.
  void await(Progress progress, uint64_t number, int rank) const;
  void await_all(Progress progress, uint64_t number) const;

  /// Waits until no rank reads this rank's buffer of `step` any more for an earlier one.
  void await_buffer(uint64_t step) const {
    if (step > kBuffers) {
      await_all(Progress::kDone, step - kBuffers);
    }
  }

  /// The number of the first step that no collective has used; `count` of them are taken.
  uint64_t take_steps(uint64_t count);

 private:
  struct Steps;
  using Counter = std::atomic<uint64_t>;

  // The progress of a rank that has entered the last collective.
  Progress call_progress() const {
    return entered_ % 2 == 0 ? Progress::kEvenCall : Progress::kOddCall;
  }
  std::byte* part(int rank) const {
    return memory_->data() + SharedMemory::kReserved + rank * part_bytes_;
  }
  Steps& steps(int rank) const;
  CallRecord& record_of(int rank, uint64_t number) const;
  Counter& counter(Progress progress, int rank) const;
  void sleep_until(Progress progress, uint64_t number, int rank) const;
  void check_alive(Progress progress, uint64_t number) const;
  [[noreturn]] void fail_mismatch(const OperationInfo& info) const;
  std::vector<int> missing(Progress progress, uint64_t number) const;

  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<const GroupState> group_;
  const std::vector<int> group_ranks_;  // group ranks of the host's ranks
  const int rank_;
  const std::shared_ptr<SharedMemory> memory_;
  const size_t part_bytes_;
  const bool may_spin_;
  std::vector<ProcessWatch> processes_;

  OperationInfo info_{};
  const Deadline* deadline_ = nullptr;
  uint64_t entered_ = 0;
  bool all_have_entered_ = true;  // whether all have entered, as far as this rank has seen
  uint64_t next_step_ = 1;
};

}  // namespace smp::comm
