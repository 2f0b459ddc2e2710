// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "dp/parameter_window.h"
#include "dp/sharded_parameters.h"
#include "graph/graph.h"
#include "graph/parameter_residency.h"
#include "runtime/runtime.h"

namespace smp::runtime {

/// Sharded data parallelism (`sharded_data_parallel_degree` above 1): which parameters are divided
/// over groups of that many consecutive replicas, and the means of programs to run on them.
/// Internal.
class Sharding {
 public:
  /// Divides the parameters of all models, one after the other, so that none needs the memory for
  /// several: `prepare` gives each, and each buffer, the data and sizes that it has on this rank.
  /// The rest stays whole: parameters of which a rank would hold fewer elements than
  /// `sdp_param_persistence_threshold`, and those that share memory with others or have gaps.
  /// Collective over the world.
  Sharding(Runtime& runtime, const std::function<void(const ParameterTable::Entry&)>& prepare);

  const std::shared_ptr<dp::ShardedParameters>& parameters() const { return parameters_; }
  const std::shared_ptr<dp::ParameterWindow>& window() const { return window_; }
  /// The ranks that have the same shards as this one.
  const comm::CommunicatorPtr& replication_group() const { return replication_group_; }

  /// The index of the divided parameter on which each value of a graph of `runtime`'s models lies,
  /// or -1.
  std::vector<int64_t> parameters_of_values(const Runtime& runtime,
                                            const graph::Graph& graph) const;

 private:
  comm::CommunicatorPtr replication_group_;
  std::shared_ptr<dp::ShardedParameters> parameters_;
  std::shared_ptr<dp::ParameterWindow> window_;
};

/// Has the divided parameters there when a stage that runs `graph` reads them.
///
/// The forward gathers them in the order in which the operators read them (through views, too). The
/// first backward goes the other way round; it notes in which order they are needed, which the
/// following ones use. Parameters that a leaf module reads stay until the microbatch's backward is
/// over, since that may take another way on each rank.
std::shared_ptr<graph::ParameterResidency> make_residency(const Runtime& runtime,
                                                          const graph::Graph& graph,
                                                          int microbatches);

/// The divided parameters in the order in which the gradients of a graph become ready, among
/// `values`.
std::vector<size_t> gradient_order(const Runtime& runtime, const graph::Graph& graph,
                                   const std::vector<graph::ValueId>& values);

}  // namespace smp::runtime
