// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "comm/collective.h"
#include "comm/shm/host_board.h"

namespace smp::comm {

/// Collectives of a group whose ranks are all on one host, through memory that they share.
///
/// - Eager, up to some KiB: every rank publishes its data with its call; when all have come, each
///   rank reduces, or takes, the parts that it needs. No rank waits again.
/// - Zero-copy, where all ranks map each other's tensors (threads of one process, or tensors of
///   Communicator::shared_tensor): every rank reduces its slice of all tensors in rank order and
///   writes the result to all of them; or copies its parts straight from the others'.
/// - Otherwise pipelined through buffers, chunk by chunk, so that the ranks copy, reduce and take
/// at the same
///   time. A rank's own slice is never copied.
class HostCollectives {
 public:
  /// `in_one_process`: the ranks are threads, so `board` has no buffers.
  HostCollectives(std::unique_ptr<HostBoard> board, bool in_one_process)
      : board_(std::move(board)), in_one_process_(in_one_process) {}

  /// Runs a call that was checked (check_collective). Throws a `CommError` on every rank, which
  /// says which rank made which call, when the ranks' calls do not match.
  void run(const Collective& call, const OperationInfo& info, const Deadline& deadline);

  /// Does the same but moves nothing: the ranks compare their calls and wait for each other. For
  /// tensors of devices, which the caller moves. Returns the longest split of all ranks of an
  /// all_to_all, otherwise 0.
  int64_t meet(const Collective& call, const OperationInfo& info, const Deadline& deadline);

 private:
  CallRecord& begin_record(const Collective& call);
  void publish(const Collective& call);
  // Calls a function that waits for other ranks. If that throws, the others may use the tensors for
  // longer than the caller has them.
  template <class Wait>
  void keeping(const Collective& call, const Wait& wait) const;
  void move(const Collective& call);
  void check_calls(const Collective& call, const OperationInfo& info) const;
  bool all_eager() const;
  bool all_mapped() const;
  Place place(const at::Tensor& tensor) const;

  const std::unique_ptr<HostBoard> board_;
  const bool in_one_process_;
};

}  // namespace smp::comm
