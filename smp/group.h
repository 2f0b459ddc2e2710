#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <vector>

#include "smp/comm_group.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace smp {

/// This rank's number in the world, on its host, and in its groups, with the sizes of those. The
/// numbering is described with `placement_strategy` in docs/configuration.md.
int rank();
int size();
int local_rank();
int local_size();
int pp_rank();
int pp_size();
int tp_rank();
int tp_size();
int rdp_rank();
int rdp_size();
int mp_rank();
int mp_size();
int dp_rank();
int dp_size();

/// The ranks of a group that this rank belongs to, between steps; see `group`. The collectives are
/// called by all ranks of the group in the same order. They take dense CPU tensors; those of the
/// kinds `kPp`, `kTp`, `kRdp` and `kDp` tensors of the models' device, too. They throw `UsageError`
/// inside a step function and for tensors that differ between the ranks in shape or type, and
/// `CommError` when a rank has failed.
class Group {
 public:
  explicit Group(CommGroup kind) : kind_(kind) {}

  CommGroup kind() const { return kind_; }
  /// This rank's number in the group, and how many there are.
  int rank() const;
  int size() const;
  /// The world ranks of the group, ascending.
  std::vector<int> ranks() const;
  /// Returns when all ranks of the group have called it.
  void barrier() const;
  /// The sum of the ranks' tensors, added in the order of the ranks; `tensor` is left as it is.
  [[nodiscard]] at::Tensor all_reduce(const at::Tensor& tensor) const;
  /// The ranks' tensors of shape [...], in the order of the ranks, as one of shape [size, ...].
  [[nodiscard]] at::Tensor all_gather(const at::Tensor& tensor) const;
  /// The libtorch process group of these ranks, for other collectives on CPU tensors. Collective at
  /// the first call. Include <torch/csrc/distributed/c10d/ProcessGroup.hpp> to use it.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const;

 private:
  CommGroup kind_;
};

/// This rank's group of a kind: `group(CommGroup::kDp).size()`. Throws `UsageError` before `init`.
[[nodiscard]] Group group(CommGroup kind);

/// Short for `group(kind).barrier()` and `group(kind).all_reduce(tensor)`.
void barrier(CommGroup kind = CommGroup::kWorld);
[[nodiscard]] at::Tensor all_reduce(const at::Tensor& tensor, CommGroup kind);

/// This replica's share of a batch that all ranks have: along `axis` (from the end if negative),
/// the equal part of number `dp_rank()` of `dp_size()`, or with `prescaled_batch` of number
/// `rdp_rank()` of `rdp_size()`. All ranks of one pipeline get the same part, as a step function
/// wants it. A view of `batch`. The twin of PyTorch's `DistributedSampler`: a shuffled order of
/// samples that is the same on all ranks is shared by `shard(order)`. Throws `UsageError` if the
/// parts are not equal.
[[nodiscard]] at::Tensor shard(const at::Tensor& batch, int64_t axis = 0);

}  // namespace smp
