// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "smp/comm_group.h"
#include "smp/export.h"
#include "smp/reduce_op.h"
#include "smp/work.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace smp {

namespace comm {
class Communicator;
class GroupCore;
}  // namespace comm

/// This rank's number in the world, on its host, and in its groups, with the sizes of those. The
/// numbering is described with `placement_strategy` in docs/configuration.md.
SMP_API int rank();
SMP_API int size();
SMP_API int local_rank();
SMP_API int local_size();
SMP_API int pp_rank();
SMP_API int pp_size();
SMP_API int tp_rank();
SMP_API int tp_size();
SMP_API int rdp_rank();
SMP_API int rdp_size();
SMP_API int mp_rank();
SMP_API int mp_size();
SMP_API int dp_rank();
SMP_API int dp_size();

/// The collectives of a group, started: each returns its work at once. The tensors must not be
/// touched until the work has been waited for. Tensors are dense and contiguous. Reductions go in
/// the order of the ranks. Autograd does not see them, so a tensor that requires a gradient is a
/// `UsageError`, unless no gradients are recorded (`torch::NoGradGuard`).
class SMP_API AsyncCollectives {
 public:
  /// For the library itself.
  explicit AsyncCollectives(std::shared_ptr<comm::Communicator> communicator);

  /// Replaces `tensor` on every rank by the reduction over the ranks.
  [[nodiscard]] WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;
  /// Replaces `tensor` on rank `root` of the group by the reduction over the ranks.
  [[nodiscard]] WorkPtr reduce(const at::Tensor& tensor, int root,
                               ReduceOp op = ReduceOp::kSum) const;
  /// Replaces `tensor` on every rank by that of rank `root` of the group.
  [[nodiscard]] WorkPtr broadcast(const at::Tensor& tensor, int root) const;
  /// Fills `output`, which has the elements of all ranks' `input`: rank r's come r-th.
  [[nodiscard]] WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) const;
  /// Reduces `input`, which has as many equal parts as there are ranks; rank r gets the r-th in
  /// `output`.
  [[nodiscard]] WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                       ReduceOp op = ReduceOp::kSum) const;
  /// Sends the r-th part of `input` to rank r, and receives rank r's into the r-th part of
  /// `output`. Splits give the parts' numbers of elements; empty ones mean equal parts.
  [[nodiscard]] WorkPtr all_to_all(const at::Tensor& output,
                                   const std::vector<int64_t>& output_splits,
                                   const at::Tensor& input,
                                   const std::vector<int64_t>& input_splits) const;
  /// Gathers as `all_gather` does, but only rank `root` needs an `output`.
  [[nodiscard]] WorkPtr gather(const at::Tensor& output, const at::Tensor& input, int root) const;
  /// Gives rank r the r-th part of rank `root`'s `input`; the others need none.
  [[nodiscard]] WorkPtr scatter(const at::Tensor& output, const at::Tensor& input, int root) const;
  /// Complete when all ranks have called it.
  [[nodiscard]] WorkPtr barrier() const;

 private:
  std::shared_ptr<comm::Communicator> communicator_;
};

/// Ranks that communicate: this rank's group of a kind (`CommGroup`), the ranks of `smddp`, or the
/// replicas that a communication hook reduces over. A value; copies refer to the same ranks.
///
/// The collectives are called by all ranks of the group in the same order. They take dense CPU
/// tensors; those of the kinds `kPp`, `kTp`, `kRdp` and `kDp`, and of hooks, tensors of the models'
/// device, too. They throw `UsageError` for tensors that differ between the ranks in shape or type,
/// and for groups of the program inside a step function; `CommError` when a rank has failed, and
/// `TimeoutError` when one does not come.
///
/// Those that return tensors leave their arguments as they are, and autograd differentiates them: a
/// tensor's gradient is that of the sum of all ranks' losses, its terms added in the order of the
/// ranks. For that the backward pass communicates: all ranks of the group give tensors that require
/// a gradient, or none does, and all differentiate functions of the results, in the same order.
/// docs/collectives.md has more.
class SMP_API Group {
 public:
  /// This rank's group of a kind: a kind may be given wherever a `Group` is taken. It is looked up
  /// when it is used, which throws `UsageError` before `init`.
  Group(CommGroup kind);  // NOLINT(google-explicit-constructor)
  /// For the library itself.
  explicit Group(std::shared_ptr<const comm::GroupCore> core) : core_(std::move(core)) {}

  /// This rank's number in the group, and how many there are.
  int rank() const;
  int size() const;
  /// The ranks of the group by their numbers in the world, ascending.
  std::vector<int> ranks() const;
  /// Returns when all ranks of the group have called it.
  void barrier() const;
  /// The reduction of the ranks' tensors, in the order of the ranks. Sums and averages have a
  /// gradient; another reduction of a tensor that requires one is a `UsageError`.
  [[nodiscard]] at::Tensor all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;
  /// The ranks' tensors of shape [...], in the order of the ranks, as one of shape [size, ...].
  [[nodiscard]] at::Tensor all_gather(const at::Tensor& tensor) const;
  /// The reduction of the ranks' tensors of shape [size, ...], of which rank r gets row r: [...].
  /// Gradients as for `all_reduce`.
  [[nodiscard]] at::Tensor reduce_scatter(const at::Tensor& tensor,
                                          ReduceOp op = ReduceOp::kSum) const;
  /// Sends row r of a tensor of shape [size, ...] to rank r, and returns the rows that the ranks
  /// have sent here, in their order, as a tensor of that shape.
  [[nodiscard]] at::Tensor all_to_all(const at::Tensor& tensor) const;
  /// The tensor of rank `root` of the group. The other ranks' give the shape and type, and have a
  /// gradient of zeros.
  [[nodiscard]] at::Tensor broadcast(const at::Tensor& tensor, int root) const;
  /// All collectives, into tensors of the caller's, while the program goes on:
  /// `group.async().all_reduce(tensor)->wait()`.
  [[nodiscard]] AsyncCollectives async() const;
  /// A libtorch process group of these ranks, for tensors of the CPU and, by way of host memory, of
  /// the GPU. Collective at the first call.
  /// Include <torch/csrc/distributed/c10d/ProcessGroup.hpp> to use it.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const;

  /// For the library itself.
  const comm::GroupCore& core() const { return *core_; }

 private:
  std::shared_ptr<const comm::GroupCore> core_;
};

/// This rank's group of a kind: `group(CommGroup::kDp).size()`. Throws `UsageError` before `init`.
[[nodiscard]] SMP_API Group group(CommGroup kind);

/// Short for `group.barrier()` and `group.all_reduce(tensor)`: `all_reduce(loss, CommGroup::kDp)`.
SMP_API void barrier(const Group& group = CommGroup::kWorld);
[[nodiscard]] SMP_API at::Tensor all_reduce(const at::Tensor& tensor, const Group& group);

/// This replica's share of a batch that all ranks have: along `axis` (from the end if negative),
/// the equal part of number `dp_rank()` of `dp_size()`, or with `prescaled_batch` of number
/// `rdp_rank()` of `rdp_size()`. All ranks of one pipeline get the same part, as a step function
/// wants it. A view of `batch`. The counterpart of PyTorch's `DistributedSampler`: a shuffled order
/// of samples that is the same on all ranks is shared by `shard(order)`. Throws `UsageError` if the
/// parts are not equal.
[[nodiscard]] SMP_API at::Tensor shard(const at::Tensor& batch, int64_t axis = 0);

}  // namespace smp
