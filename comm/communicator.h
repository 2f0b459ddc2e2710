#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/channel.h"
#include "comm/collective.h"
#include "comm/work.h"

namespace smp::comm {

/// A message tag. Messages of one (source, destination, tag) arrive in the order sent; messages
/// of different tags may be received in any order. Valid tags are 0 <= tag <= kMaxTag.
using Tag = int;
constexpr Tag kMaxTag = (1 << 20) - 1;

/// A group of ranks that communicate. Ranks are numbered 0 to size() - 1 inside the group. A
/// group of one works and moves nothing. All tensors are dense, contiguous CPU tensors of any
/// dtype (checked). Collectives must be called by all ranks of the group in the same order with
/// the same op, dtype, number of elements and root; those of different groups may be called in any
/// order. Wrong arguments are a `UsageError`.
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

  /// Starts any collective. The methods below make the calls that it takes.
  virtual WorkPtr start(const Collective& call) = 0;

  /// As start() and wait(), but may be faster: nothing is handed to another thread unless
  /// collectives of this group are outstanding.
  virtual void run(const Collective& call) { start(call)->wait(); }

  /// Starts to replace `tensor` on every rank by the reduction over the ranks. A dtype that the op
  /// is not defined for is a `UsageError`.
  WorkPtr iall_reduce(const at::Tensor& tensor, ReduceOp op) {
    return start(all_reduce_call(tensor, op));
  }

  /// Starts to replace `tensor` on rank `root` by the reduction over the ranks; the others' tensors
  /// keep their values.
  WorkPtr ireduce(const at::Tensor& tensor, int root, ReduceOp op) {
    return start(reduce_call(tensor, root, op));
  }

  /// Starts to replace `tensor` on every rank by that of `root`.
  WorkPtr ibroadcast(const at::Tensor& tensor, int root) {
    return start(broadcast_call(tensor, root));
  }

  /// Starts to gather: `output` has size() times the elements of `input`; rank r's come r-th.
  /// `input` may be rank()'s part of `output`.
  WorkPtr iall_gather(const at::Tensor& output, const at::Tensor& input) {
    return start(all_gather_call(output, input));
  }

  /// Starts to reduce `input`, which has size() times the elements of `output`; rank r gets the
  /// r-th part of the result. `output` may be rank()'s part of `input`, which otherwise keeps its
  /// values.
  WorkPtr ireduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
    return start(reduce_scatter_call(output, input, op));
  }

  /// Starts to send the r-th part of `input` to rank r and to receive rank r's into the r-th part
  /// of `output`. Parts lie one after the other; splits give their numbers of elements, and empty
  /// ones mean equal parts. What a rank sends must be what the other expects. The two tensors must
  /// not overlap.
  WorkPtr iall_to_all(const at::Tensor& output, const std::vector<int64_t>& output_splits,
                      const at::Tensor& input, const std::vector<int64_t>& input_splits) {
    return start(all_to_all_call(output, output_splits, input, input_splits));
  }

  /// As iall_gather, but only `root` gets the result; elsewhere `output` may be undefined.
  WorkPtr igather(const at::Tensor& output, const at::Tensor& input, int root) {
    return start(gather_call(output, input, root));
  }

  /// Starts to give rank r the r-th part of `root`'s `input`, which has size() times the elements
  /// of `output`; elsewhere `input` may be undefined.
  WorkPtr iscatter(const at::Tensor& output, const at::Tensor& input, int root) {
    return start(scatter_call(output, input, root));
  }

  /// Returns when all ranks of the group have called it.
  void barrier() { run(Collective()); }

  /// A tensor of `numel` zeros, one for each rank, in memory that the ranks of one host map: where
  /// all ranks give such tensors to a collective, they read and write each other's instead of
  /// copying them first. Its data start at a multiple of 64 bytes. An ordinary tensor where ranks
  /// cannot share memory, or there is too little of it. Freed when the last tensor on it is gone,
  /// which may be after the communicator. Collective and blocking: every rank gives the same
  /// numbers (a `CommError` otherwise).
  virtual at::Tensor shared_tensor(int64_t numel, at::ScalarType dtype) = 0;

  /// Opens channels (see channel.h) to and from other ranks: through memory that both ends map
  /// where that is possible, otherwise over isend and irecv. Returns when they are open at both
  /// ends: the ranks at the other ends make such a call for the same channels now, each with its
  /// own lists. Throws a `CommError` when there is not the memory for them or the ends disagree.
  virtual Channels open_channels(const std::vector<ChannelSpec>& outgoing,
                                 const std::vector<ChannelSpec>& incoming) = 0;

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

  /// Whether every collective of this group first compares the calls of all ranks, and throws a
  /// `CommError` on all of them that says which rank called what when they differ. Between ranks of
  /// one host this is always done; elsewhere it costs a message to and from each rank. Off at first
  /// unless the environment variable SMP_COMM_CHECK is 1; a split inherits it. All ranks must set
  /// the same, between the same collectives.
  virtual void check_collectives(bool on) = 0;

  void send(const at::Tensor& tensor, int destination, Tag tag) {
    isend(tensor, destination, tag)->wait();
  }
  void recv(const at::Tensor& tensor, int source, Tag tag) { irecv(tensor, source, tag)->wait(); }

  // The blocking twins.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) {
    run(all_reduce_call(tensor, op));
  }
  void reduce(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum) {
    run(reduce_call(tensor, root, op));
  }
  void broadcast(const at::Tensor& tensor, int root) { run(broadcast_call(tensor, root)); }
  void all_gather(const at::Tensor& output, const at::Tensor& input) {
    run(all_gather_call(output, input));
  }
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                      ReduceOp op = ReduceOp::kSum) {
    run(reduce_scatter_call(output, input, op));
  }
  void all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_splits,
                  const at::Tensor& input, const std::vector<int64_t>& input_splits) {
    run(all_to_all_call(output, output_splits, input, input_splits));
  }
  void gather(const at::Tensor& output, const at::Tensor& input, int root) {
    run(gather_call(output, input, root));
  }
  void scatter(const at::Tensor& output, const at::Tensor& input, int root) {
    run(scatter_call(output, input, root));
  }

 private:
  using Kind = Collective::Kind;

  static Collective all_reduce_call(const at::Tensor& tensor, ReduceOp op) {
    return {Kind::kAllReduce, tensor, tensor, op, -1, {}, {}};
  }
  static Collective reduce_call(const at::Tensor& tensor, int root, ReduceOp op) {
    return {Kind::kReduce, tensor, tensor, op, root, {}, {}};
  }
  static Collective broadcast_call(const at::Tensor& tensor, int root) {
    return {Kind::kBroadcast, tensor, tensor, ReduceOp::kSum, root, {}, {}};
  }
  static Collective all_gather_call(const at::Tensor& output, const at::Tensor& input) {
    return {Kind::kAllGather, output, input, ReduceOp::kSum, -1, {}, {}};
  }
  static Collective reduce_scatter_call(const at::Tensor& output, const at::Tensor& input,
                                        ReduceOp op) {
    return {Kind::kReduceScatter, output, input, op, -1, {}, {}};
  }
  static Collective all_to_all_call(const at::Tensor& output,
                                    const std::vector<int64_t>& output_splits,
                                    const at::Tensor& input,
                                    const std::vector<int64_t>& input_splits) {
    return {Kind::kAllToAll, output, input, ReduceOp::kSum, -1, output_splits, input_splits};
  }
  static Collective gather_call(const at::Tensor& output, const at::Tensor& input, int root) {
    return {Kind::kGather, output, input, ReduceOp::kSum, root, {}, {}};
  }
  static Collective scatter_call(const at::Tensor& output, const at::Tensor& input, int root) {
    return {Kind::kScatter, output, input, ReduceOp::kSum, root, {}, {}};
  }
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

/// Gathers byte strings of any lengths; element r is rank r's. Collective and blocking.
std::vector<std::string> all_gather_bytes(Communicator& group, const std::string& bytes);

/// Returns `root`'s byte string on every rank. Collective and blocking.
std::string broadcast_bytes(Communicator& group, const std::string& bytes, int root);

}  // namespace smp::comm
