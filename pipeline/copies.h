// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "dp/sharded_parameters.h"
#include "graph/graph.h"
#include "graph/tensor_table.h"
#include "partitioner/plan.h"
#include "pipeline/frame.h"

namespace smp::pipeline {

/// The copies of a plan, in ascending order of (from, to): the same list on every rank. Stages of
/// one rank share a copy, and the owner's stages the owner's tensor.
std::vector<Frame::Copy> copies_of(const partitioner::Plan& plan);

/// The copies between two stages on one of their ranks, with their tensors.
class CopiedTensors {
 public:
  /// `parameters` and `shard_of_value`: `sharded` and its numbers of `Executor::Setup`.
  CopiedTensors(const Frame::Copy& copy, const graph::Graph& graph, const graph::TensorTable& table,
                std::shared_ptr<dp::ShardedParameters> parameters,
                const std::vector<std::optional<size_t>>& shard_of_value);

  /// Buffers that no step has written, equal on both ranks: their copies need not be made anew.
  using Unwritten = std::set<graph::ValueId>;

  /// Sends those that are not `unwritten`, and returns when all have been sent. One that replicas
  /// divide is gathered for it, alone.
  void send(comm::Communicator& pipeline, int to, const Unwritten& unwritten) const;
  /// Takes them.
  void receive(comm::Communicator& pipeline, int from, const Unwritten& unwritten) const;
  /// Their bytes.
  int64_t nbytes(const Unwritten& unwritten) const;

 private:
  struct Copied {
    graph::ValueId value;
    at::Tensor tensor;
    std::optional<size_t> shard;  // its number where replicas divide it
  };

  std::vector<Copied> written(const Unwritten& unwritten) const;

  std::shared_ptr<dp::ShardedParameters> parameters_;
  std::vector<Copied> copied_;
};

}  // namespace smp::pipeline
