// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "comm/collective.h"
#include "smp/work.h"

namespace smp::comm {

/// The collective operations. Each makes a `Collective` and hands it to `Derived::issue`, which
/// returns a `Result`: nothing where it has waited for the operation, or its Work.
template <class Derived, class Result>
class CollectiveOperations {
 public:
  /// Replaces `tensor` on every rank by the reduction over the ranks. A dtype that the op is not
  /// defined for is a `UsageError`.
  Result all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) {
    return issue({Kind::kAllReduce, tensor, tensor, op, kNoRoot, {}, {}});
  }

  /// Replaces `tensor` on rank `root` by the reduction over the ranks; the others' tensors keep
  /// their values.
  Result reduce(const at::Tensor& tensor, int root, ReduceOp op = ReduceOp::kSum) {
    return issue({Kind::kReduce, tensor, tensor, op, root, {}, {}});
  }

  /// Replaces `tensor` on every rank by that of `root`.
  Result broadcast(const at::Tensor& tensor, int root) {
    return issue({Kind::kBroadcast, tensor, tensor, ReduceOp::kSum, root, {}, {}});
  }

  /// `output` has size() times the elements of `input`; rank r's come r-th. `input` may be rank()'s
  /// part of `output`.
  Result all_gather(const at::Tensor& output, const at::Tensor& input) {
    return issue({Kind::kAllGather, output, input, ReduceOp::kSum, kNoRoot, {}, {}});
  }

  /// Reduces `input`, which has size() times the elements of `output`; rank r gets the r-th part of
  /// the result. `output` may be rank()'s part of `input`, which otherwise keeps its values.
  Result reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                        ReduceOp op = ReduceOp::kSum) {
    return issue({Kind::kReduceScatter, output, input, op, kNoRoot, {}, {}});
  }

  /// Sends the r-th part of `input` to rank r and receives rank r's into the r-th part of `output`.
  /// Parts lie one after the other; splits give their numbers of elements, and empty ones mean
  /// equal parts. A rank must send as much as the other expects. The two tensors must not overlap.
  Result all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_splits,
                    const at::Tensor& input, const std::vector<int64_t>& input_splits) {
    return issue(
        {Kind::kAllToAll, output, input, ReduceOp::kSum, kNoRoot, output_splits, input_splits});
  }

  /// Gathers as all_gather does, but only `root` gets the result; elsewhere `output` may be
  /// undefined.
  Result gather(const at::Tensor& output, const at::Tensor& input, int root) {
    return issue({Kind::kGather, output, input, ReduceOp::kSum, root, {}, {}});
  }

  /// Gives rank r the r-th part of `root`'s `input`, which has size() times the elements of
  /// `output`; elsewhere `input` may be undefined.
  Result scatter(const at::Tensor& output, const at::Tensor& input, int root) {
    return issue({Kind::kScatter, output, input, ReduceOp::kSum, root, {}, {}});
  }

  /// Complete when all ranks of the group have called it.
  Result barrier() { return issue(Collective()); }

 private:
  using Kind = Collective::Kind;
  static constexpr int kNoRoot = -1;

  Result issue(const Collective& call) { return static_cast<Derived*>(this)->issue(call); }
};

class Collectives;

/// The operations of a group, started: each returns its Work.
class AsyncCollectives : public CollectiveOperations<AsyncCollectives, WorkPtr> {
 public:
  explicit AsyncCollectives(Collectives& group) : group_(group) {}

  WorkPtr issue(const Collective& call);

 private:
  Collectives& group_;
};

/// The operations of a group within a `CollectiveTask`. Each returns when it is complete.
class TaskCollectives : public CollectiveOperations<TaskCollectives, void> {
 public:
  explicit TaskCollectives(std::function<void(const Collective&)> run) : run_(std::move(run)) {}

  void issue(const Collective& call) { run_(call); }

 private:
  const std::function<void(const Collective&)> run_;
};

/// Collectives of a group that follow each other, with computations between them.
using CollectiveTask = std::function<void(TaskCollectives& group)>;

/// Operations of all ranks of a group. They call the same operations in the same order, with the
/// same op, dtype, number of elements and root; those of different groups may be called in any
/// order. The methods themselves return when the operation is complete; those of async() start it.
/// One thread at a time may call them.
class Collectives : public CollectiveOperations<Collectives, void> {
 public:
  virtual ~Collectives() = default;

  /// Starts any collective.
  virtual WorkPtr start(const Collective& call) = 0;

  /// Starts a task on tensors of `device`, which takes its turn among the collectives as one of
  /// them: it runs in turn with them, on their thread and, on a device, on their stream.
  /// `Work::wait` throws its exception. The tensors that it holds must stay as they are until then,
  /// and those that it leaves for others must have been allocated before.
  virtual WorkPtr start(at::Device device, CollectiveTask task) = 0;

  /// Does the same as start() and wait(), but may be faster: nothing is handed to another thread
  /// unless collectives of this group are outstanding.
  virtual void run(const Collective& call) { start(call)->wait(); }

  /// `group.async().all_reduce(tensor)` starts an all_reduce and returns its Work.
  AsyncCollectives async() { return AsyncCollectives(*this); }

  void issue(const Collective& call) { run(call); }

  /// A tensor of `numel` zeros, one for each rank, in memory that the ranks of one host map: where
  /// all ranks give such tensors to a collective, they read and write each other's instead of
  /// copying them first. Its data start at a multiple of 64 bytes. An ordinary tensor where ranks
  /// cannot share memory, or there is too little of it. Freed when the last tensor on it is gone,
  /// which may be after the communicator. Collective and blocking: every rank gives the same
  /// numbers (a `CommError` otherwise).
  virtual at::Tensor shared_tensor(int64_t numel, at::ScalarType dtype) = 0;

  /// Whether every collective of this group first compares the calls of all ranks, and throws a
  /// `CommError` on all of them that says which rank made which call when they differ. Between
  /// ranks of one host this is always done; elsewhere it costs a message to and from each rank. Off
  /// at first unless the environment variable SMP_COMM_CHECK is 1; a split inherits it. All ranks
  /// must set the same, between the same collectives.
  virtual void check_collectives(bool on) = 0;
};

inline WorkPtr AsyncCollectives::issue(const Collective& call) { return group_.start(call); }

}  // namespace smp::comm
