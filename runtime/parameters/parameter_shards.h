// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "dp/sharded_parameters.h"
#include "graph/graph.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// Sharded data parallelism (`sharded_data_parallel_degree` above 1): which parameters are divided
/// over groups of that many consecutive replicas. Each rank has shards of the parameters that it
/// owns. Internal.
class ParameterShards {
 public:
  /// Divides the parameters of all models, one after the other, so that none needs the memory for
  /// several: `prepare` gives each, and each buffer, the data and sizes that it has on this rank.
  /// The rest stays whole: parameters of which a rank would hold fewer elements than
  /// `sdp_param_persistence_threshold`, and those that share memory with others or have gaps.
  /// Collective over the world.
  ParameterShards(Runtime& runtime,
                  const std::function<void(const ParameterTable::Entry&)>& prepare);

  const std::shared_ptr<dp::ShardedParameters>& parameters() const { return parameters_; }
  /// The ranks that have the same shards as this one.
  const comm::CommunicatorPtr& replication_group() const { return replication_group_; }

  /// The parameters that replicas divide, here or on the ranks that own them. The same on all
  /// ranks.
  const std::set<std::string>& names() const { return divided_; }
  /// The number of each value of a graph of `runtime`'s models in `parameters()`, where it is one
  /// of them.
  std::vector<std::optional<size_t>> shard_of_value(const Runtime& runtime,
                                                    const graph::Graph& graph) const;

 private:
  comm::CommunicatorPtr replication_group_;
  std::shared_ptr<dp::ShardedParameters> parameters_;
  std::set<std::string> divided_;  // names of divided parameters
};

/// The divided parameters in the order in which the gradients of a graph become ready, among
/// `values`.
std::vector<size_t> gradient_order(const Runtime& runtime, const graph::Graph& graph,
                                   const std::vector<graph::ValueId>& values);

}  // namespace smp::runtime
