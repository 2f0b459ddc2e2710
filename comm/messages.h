// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/channel.h"
#include "smp/work.h"

namespace smp::comm {

/// A message tag. Messages of one (source, destination, tag) arrive in the order sent; messages
/// of different tags may be received in any order. Valid tags are 0 <= tag <= kMaxTag.
using Tag = int;
constexpr Tag kMaxTag = (1 << 20) - 1;

/// In place of a rank: none, as of a collective, and whichever sends first.
constexpr int kNoRank = -1;
constexpr int kAnyRank = -2;

/// A receive from whichever rank sends first.
class ReceiveWork : public Work {
 public:
  /// The rank whose message came. Once the work is complete.
  virtual int source() const = 0;
};

using ReceiveWorkPtr = std::shared_ptr<ReceiveWork>;

/// Messages between two ranks of a group. The methods may be called from several threads.
class Messages {
 public:
  virtual ~Messages() = default;

  /// Starts to send `tensor` to `destination`. The work is complete when the tensor may be
  /// reused, which does not mean that it was received.
  virtual WorkPtr isend(const at::Tensor& tensor, int destination, Tag tag) = 0;

  /// Starts to receive into `tensor` from `source`. A message of another byte length than the
  /// tensor's is a `CommError` that gives both lengths.
  virtual WorkPtr irecv(const at::Tensor& tensor, int source, Tag tag) = 0;

  /// Receives like irecv(), from whichever rank's message with this tag comes first; receives take
  /// messages in the order in which they were posted, those from one rank and those from any
  /// together. CPU tensors only (a `UsageError` otherwise).
  virtual ReceiveWorkPtr irecv_from_any(const at::Tensor& tensor, Tag tag) = 0;

  /// Does the same as isend() and irecv(), and waits.
  void send(const at::Tensor& tensor, int destination, Tag tag) {
    isend(tensor, destination, tag)->wait();
  }
  void recv(const at::Tensor& tensor, int source, Tag tag) { irecv(tensor, source, tag)->wait(); }

  /// Opens channels (see channel.h) to and from other ranks: through memory that both ends map
  /// where that is possible, otherwise over isend and irecv. Returns when they are open at both
  /// ends: the ranks at the other ends make such a call for the same channels now, each with its
  /// own lists. Throws a `CommError` when there is not the memory for them or the ends disagree.
  virtual Channels open_channels(const std::vector<ChannelSpec>& outgoing,
                                 const std::vector<ChannelSpec>& incoming) = 0;
};

}  // namespace smp::comm
