// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "dp/parameter_pieces.h"

namespace smp::dp {

/// Parameters divided over the ranks of a group (ZeRO-3; Rajbhandari, Rasley, Ruwase and He, "ZeRO:
/// Memory Optimizations Toward Training Trillion Parameter Models", 2020; over groups smaller than
/// the world: Zhang et al., "MiCS", 2022). Each rank has one *shard* of each and trains it; the
/// parameter itself has data only between `gather` and `release`. Its tensor object, sizes, strides
/// and storage stay, so code that holds it or a view of it reads the gathered values.
///
/// A shard is a run of the parameter's memory, the r-th of equal length for rank r, where the last
/// ones may be shorter or empty. Shards are the *pieces* of `ParameterPieces`, with memory of their
/// own and a bucket for each parameter.
///
/// Belongs to one thread at a time. All ranks add the same parameters in the same order; collective
/// methods are called in the same order on all.
class ShardedParameters final : public ParameterPieces {
 public:
  explicit ShardedParameters(comm::CommunicatorPtr group) : ParameterPieces(std::move(group)) {}

  /// Whether it can be divided: it is dense, and lies alone on its storage, as far as can be seen
  /// from it.
  static bool is_divisible(const at::Tensor& parameter);

  /// Keeps this rank's shard of a parameter with data and frees the rest. Returns its index.
  size_t add(const at::Tensor& parameter, const std::string& name);

  bool divides_values() const override { return true; }
  size_t size() const { return entries_.size(); }
  const at::Tensor& parameter(size_t index) const { return parameters()[index]; }
  const std::string& name(size_t index) const { return names()[index]; }
  /// Elements of the parameter.
  int64_t numel(size_t index) const { return parameter(index).numel(); }
  /// This rank's shard: one-dimensional, without padding, perhaps empty; a leaf that requires a
  /// gradient where the parameter does.
  const at::Tensor& shard(size_t index) const { return entries_[index].shard; }

  /// Starts to give the parameter its data, unless it has them. Each call has its `release`.
  /// Collective.
  void gather(size_t index);
  /// Returns when it has them. Throws the errors of communication, with the parameter's name.
  void wait(size_t index);
  /// True from `gather` to the last `release`.
  bool is_live(size_t index) const { return entries_[index].users > 0; }
  /// Frees the data, unless they were gathered for others, too; waits for those under way.
  void release(size_t index);

  /// Elements of the parameters that are live; and how many there ever were.
  int64_t live() const { return live_; }
  int64_t peak_live() const { return peak_live_; }

  /// Shards have memory of their own.
  void bind() override {}
  /// Parameters are gathered when they are read.
  void all_gather(const std::vector<bool>&) override {}

  /// Gives all parameters data that the program may change freely: it is not kept. Collective.
  void lend();
  /// Frees all data: those that `lend` gave, and those of a step that failed.
  void take_back();

 private:
  struct Entry {
    at::Tensor padded;  // the shard in full length
    at::Tensor shard;
    WorkPtr work;   // work of a gather under way
    int users = 0;  // calls of `gather` without their `release`
  };

  void free(size_t index);

  std::vector<Entry> entries_;
  int64_t live_ = 0;
  int64_t peak_live_ = 0;
};

}  // namespace smp::dp
