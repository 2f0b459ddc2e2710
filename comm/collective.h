// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "smp/reduce_op.h"

namespace smp::comm {

/// One call of a collective, as data: the request to a communicator. The methods of Communicator
/// make these, and define each kind.
struct Collective {
  enum class Kind : uint8_t {
    kAllReduce,
    kReduce,
    kBroadcast,
    kAllGather,
    kReduceScatter,
    kAllToAll,
    kGather,
    kScatter,
    kBarrier,
    kSharedTensor,  ///< Only compared; see Communicator::shared_tensor.
  };

  Kind kind = Kind::kBarrier;
  at::Tensor output;  ///< The same tensor as `input` where the operation works in place.
  at::Tensor input;
  ReduceOp op = ReduceOp::kSum;
  int root = -1;                       ///< -1 where there is none.
  std::vector<int64_t> output_splits;  ///< Elements by rank; empty for equal parts.
  std::vector<int64_t> input_splits;

  /// "all_reduce", "reduce", ...
  const char* name() const { return name(kind); }
  static const char* name(Kind kind);

  bool reduces() const {
    return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
  }

  bool has_root() const;

  /// Whether this rank's `input` is read, and its `output` written. The other tensors may be
  /// undefined, but for those of operations in place.
  bool reads(int rank) const;
  bool writes(int rank) const;

  /// The tensor by which the ranks compare their calls: the one that is the same on all of them.
  const at::Tensor& uniform_tensor() const {
    return kind == Kind::kReduceScatter || kind == Kind::kScatter ? output : input;
  }
};

/// The part of a call that must be the same on all ranks.
struct Signature {
  Collective::Kind kind = Collective::Kind::kBarrier;
  uint8_t op = 0;
  int8_t dtype = 0;
  bool on_device = false;  ///< Whether its tensors lie on a device other than the CPU.
  int32_t root = -1;
  int64_t numel = 0;  ///< Elements of the tensor of one size on all ranks; all_to_all: 0.

  bool operator==(const Signature& other) const;

  /// "all_reduce (sum) of 8 x Float", "broadcast of 8 x Float with root 1".
  std::string text() const;
};
Signature signature_of(const Collective& call);

/// Throws a `UsageError` unless `tensor` is a defined, dense, contiguous one on `device`. `verb`
/// names the operation, `argument` the tensor.
void check_tensor(const std::string& group, const char* verb, const char* argument,
                  const at::Tensor& tensor, at::Device device = at::kCPU);

/// Throws a `UsageError` unless 0 <= rank < size.
void check_rank(const std::string& group, const char* verb, const char* argument, int rank,
                int size);

/// Throws a `UsageError` for a wrong call by rank `rank` of group `group` on tensors of `device`;
/// fills in splits that are empty.
void check_collective(Collective& call, const std::string& group, int rank, int size,
                      at::Device device = at::kCPU);

}  // namespace smp::comm
