// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "graph/graph.h"
#include "graph/tensor_table.h"
#include "partitioner/plan.h"
#include "pipeline/frame.h"

namespace smp::pipeline {

/// The copies of a plan, in ascending order of (from, to): the same list on every rank. Stages of
/// one rank share a copy, and the owner's stages the owner's tensor. Whether they are divided is
/// not set.
std::vector<Frame::Copy> copies_of(const partitioner::Plan& plan);

/// The copies between two stages on one of their ranks, with their tensors.
class CopiedTensors {
 public:
  /// `shard_of_value`: as for `Executor::use_shards`, or empty.
  CopiedTensors(const Frame::Copy& copy, const graph::Graph& graph, const graph::TensorTable& table,
                const std::vector<std::optional<size_t>>& shard_of_value);

  /// Sends those that are not `unwritten`, and returns when all have been sent.
  void send(comm::Communicator& pipeline, int to, const std::set<graph::ValueId>& unwritten) const;
  /// Takes them. `unwritten` is equal on both ranks.
  void receive(comm::Communicator& pipeline, int from,
               const std::set<graph::ValueId>& unwritten) const;

  int64_t nbytes() const;
  /// The numbers of those that replicas divide.
  const std::vector<size_t>& shards() const { return shards_; }

 private:
  std::vector<std::pair<graph::ValueId, at::Tensor>> copied_;
  std::vector<size_t> shards_;
};

}  // namespace smp::pipeline
