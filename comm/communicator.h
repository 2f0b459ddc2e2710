#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/channel.h"
#include "comm/work.h"

namespace smp::comm {

/// How elements of several ranks are combined. Every reduction adds in ascending rank order
/// within the group, element by element, so the result has the same bits on every rank and in
/// every run: ((rank 0 + rank 1) + rank 2) + ...
enum class ReduceOp { kSum, kMin, kMax };

/// A message tag. Messages of one (source, destination, tag) arrive in the order sent; messages
/// of different tags may be received in any order. Valid tags are 0 <= tag <= kMaxTag.
using Tag = int;
constexpr Tag kMaxTag = (1 << 20) - 1;

/// A group of ranks that communicate. Ranks are numbered 0 to size() - 1 inside the group. A
/// group of one works and moves nothing. All tensors are dense, contiguous CPU tensors of any
/// dtype (checked). Collectives must be called by all ranks of the group in the same order; those
/// of different groups may be called in any order. Wrong arguments are a `UsageError`.
///
/// Operations go on while their rank computes. An operation whose wait has thrown may still be
/// under way, so the tensors' contents are undefined and the group is of no further use: abort.
///
/// Threading: the methods of one communicator may be called from several threads for send and
/// recv; collectives of one communicator only from one thread at a time.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// "world", "pp[0,2]" ...: what errors call this group.
  virtual const std::string& name() const = 0;

  /// Starts to send `tensor` to `destination`. The work is complete when the tensor may be
  /// reused, which does not mean that it was received.
  virtual WorkPtr isend(const at::Tensor& tensor, int destination, Tag tag) = 0;

  /// Starts to receive into `tensor` from `source`. A message of another byte length than the
  /// tensor's is a `CommError` that gives both lengths.
  virtual WorkPtr irecv(const at::Tensor& tensor, int source, Tag tag) = 0;

  /// Starts to replace `tensor` on every rank by the reduction over the ranks. For floating point
  /// tensors (float16 and bfloat16 are added in float32 and rounded once), integers, and bool with
  /// kMin and kMax; anything else is a `UsageError`.
  virtual WorkPtr iall_reduce(const at::Tensor& tensor, ReduceOp op) = 0;

  /// Starts to replace `tensor` on every rank by that of `root`.
  virtual WorkPtr ibroadcast(const at::Tensor& tensor, int root) = 0;

  /// Starts to gather: `output` has size() times the elements of `input`; rank r's come r-th.
  virtual WorkPtr iall_gather(const at::Tensor& output, const at::Tensor& input) = 0;

  /// Opens channels (see channel.h) to and from other ranks: through memory that both ends map
  /// where that is possible, otherwise over isend and irecv. Returns when they are open at both
  /// ends: the ranks at the other ends make such a call for the same channels now, each with its
  /// own lists. Throws a `CommError` when there is not the memory for them or the ends disagree.
  virtual Channels open_channels(const std::vector<ChannelSpec>& outgoing,
                                 const std::vector<ChannelSpec>& incoming) = 0;

  /// Returns when all ranks of the group have called it.
  virtual void barrier() = 0;

  /// Makes a communicator of those ranks of this one whose list is the one given. Collective
  /// over *this* communicator: every rank calls it with its own group, whose members all pass the
  /// same list (ascending ranks of this communicator, the caller's among them).
  virtual std::shared_ptr<Communicator> split(const std::vector<int>& members,
                                              const std::string& name) = 0;

  /// Tells all ranks of the job that this one has failed and why: every wait, present or to
  /// come, throws a `CommError` that quotes `reason` and this rank. Never blocks, never throws;
  /// only the first call counts.
  virtual void abort(const std::string& reason) noexcept = 0;

  /// How long a wait may take, from its start, before it throws `TimeoutError`: 300 s at first; a
  /// split inherits it.
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  virtual std::chrono::milliseconds timeout() const = 0;

  void send(const at::Tensor& tensor, int destination, Tag tag) {
    isend(tensor, destination, tag)->wait();
  }
  void recv(const at::Tensor& tensor, int source, Tag tag) { irecv(tensor, source, tag)->wait(); }
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) {
    iall_reduce(tensor, op)->wait();
  }
  void broadcast(const at::Tensor& tensor, int root) { ibroadcast(tensor, root)->wait(); }
  void all_gather(const at::Tensor& output, const at::Tensor& input) {
    iall_gather(output, input)->wait();
  }
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

/// Gathers byte strings of any lengths; element r is rank r's. Collective and blocking.
std::vector<std::string> all_gather_bytes(Communicator& group, const std::string& bytes);

/// Returns `root`'s byte string on every rank. Collective and blocking.
std::string broadcast_bytes(Communicator& group, const std::string& bytes, int root);

}  // namespace smp::comm
