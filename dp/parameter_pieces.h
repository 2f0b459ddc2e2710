// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/sharding.h"
#include "dp/bucket_layout.h"

namespace smp::dp {

/// Parameters divided among the replicas of a group (ZeRO; Rajbhandari, Rasley, Ruwase and He,
/// "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020): each gradient
/// bucket has as many equal parts as there are replicas, and replica i owns the i-th of every
/// bucket, which is a *piece* of some of the parameters. The owner of a piece has its gradient,
/// updates it and has the optimizer's state for it; `all_gather` gives the updated pieces to all.
///
/// A piece is a one-dimensional tensor that shares the parameter's memory, which SMP calls a
/// virtual parameter. The reduced gradient is the piece's `.grad`. `.grad` of the parameter itself
/// says whether there is one, and has no numbers: it is absent (graph/absent.h), so that code that
/// would read or write them is refused. To make it undefined drops the gradient.
///
/// Belongs to one thread. All ranks of the group must have the same parameters in the same order;
/// those of a rank are on one device. Parameters keep their identity; their memory may change.
class ParameterPieces {
 public:
  virtual ~ParameterPieces() = default;

  /// `names` are for errors and checkpoints; `bucket_bytes` is the size of a bucket in bytes.
  ParameterPieces(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                  comm::CommunicatorPtr group, int64_t bucket_bytes);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<std::string>& names() const { return names_; }
  const comm::CommunicatorPtr& group() const { return group_; }
  const BucketLayout& layout() const { return layout_; }

  /// Whether replicas divide the values, so that none keeps a parameter whole; else only what is
  /// needed to update them.
  virtual bool divides_values() const { return false; }
  /// This replica's pieces, by parameter; undefined where it owns nothing, which are most.
  const std::vector<at::Tensor>& own() const { return own_; }
  /// How the replicas divide a parameter, in the order of its memory (where it is not dense: of its
  /// indices).
  comm::Range range(size_t index) const;
  /// The first element of a parameter that a replica owns, and the one behind the last.
  std::pair<int64_t, int64_t> owned(size_t index, int replica) const {
    return range(index).of(replica, parameters_[index].numel());
  }

  /// This replica's piece in its part of a bucket, which may be any tensor of that length.
  at::Tensor in_part(const at::Tensor& part, size_t index) const;
  /// The elements of any tensor with the sizes of parameter `index` in the order of the parameter's
  /// memory. Shares that of the parameter itself, if it is dense.
  at::Tensor flat(const at::Tensor& tensor, size_t index) const;

  /// Lets the pieces share the memory that the parameters have now: to be called before they are
  /// read or updated.
  virtual void bind();
  /// Gives the pieces of the parameters that are `updated` (by index), as they are now, to all
  /// replicas, bucket by bucket. Collective: all replicas give the same.
  virtual void all_gather(const std::vector<bool>& updated);
  /// Whether this replica's piece of parameter `index` was written since the last `all_gather` of
  /// it, which the other replicas do not see. Writes of the parameter itself do not count.
  bool is_written(size_t index) const { return writes(index) != gathered_writes_[index]; }

  /// Adds this replica's piece of the gradient of parameter `index` to the piece's `.grad`, or sets
  /// it, and marks the parameter as having a gradient.
  void add_gradient(size_t index, const at::Tensor& gradient);
  /// Whether parameter `index` has a gradient. Drops the piece's where the program has dropped the
  /// parameter's. Throws `UsageError` where the program has put numbers there.
  bool has_gradient(size_t index);

 protected:
  /// Without parameters at first.
  explicit ParameterPieces(comm::CommunicatorPtr group) : group_(std::move(group)) {}
  /// Adds a parameter with a bucket of its own; the caller gives this replica's piece of it.
  /// Returns its index.
  size_t add(const at::Tensor& parameter, const std::string& name);

  std::vector<at::Tensor> own_;

 private:
  /// The elements that this replica owns.
  std::pair<int64_t, int64_t> owned(size_t index) const { return owned(index, group_->rank()); }
  /// How often this replica's piece was written; 0 where it has none.
  int64_t writes(size_t index) const;

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  comm::CommunicatorPtr group_;
  BucketLayout layout_;
  std::vector<at::Tensor> markers_;       // `.grad` of parameters that have a gradient
  std::vector<int64_t> gathered_writes_;  // writes that all replicas have
};

}  // namespace smp::dp
