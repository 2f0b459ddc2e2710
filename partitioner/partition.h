// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "graph/graph.h"
#include "partitioner/pins.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"

namespace smp::partitioner {

/// How a graph is divided among the ranks of a pipeline, which the user calls partitions.
struct PartitionOptions {
  explicit PartitionOptions(int partitions = 1) : partitions_(partitions) {}

  /// Number of ranks.
  TORCH_ARG(int, partitions);

  /// The rank of each stage, for schedules that visit a rank several times; empty: one stage for
  /// each rank, in their order. Pins may ask for others (see `list_stages`).
  TORCH_ARG(std::vector<int>, placement);

  /// The step for which time and memory are predicted, and the memory that it may take.
  TORCH_ARG(StepModel, step);

  /// Weight of memory against time in an operator's cost, 0 to 1: see `operator_costs`.
  TORCH_ARG(double, memory_weight) = 0.8;

  /// How far the predicted step may be above the optimum to keep modules whole, as a fraction. The
  /// default is below the noise of measured times.
  TORCH_ARG(double, tolerance) = 0.01;

  /// An earlier plan of the same graph, or null. It is kept as long as no other is predicted to be
  /// faster by more than the fraction `keep`.
  TORCH_ARG(std::shared_ptr<const Plan>, previous);
  TORCH_ARG(double, keep) = 0.05;

  /// Owners settled by an earlier plan of the same program. Names that the graph does not read are
  /// ignored.
  TORCH_ARG(Owners, owner);

  /// Parameters and buffers that the user wants on a partition: whatever reads them runs there.
  TORCH_ARG(Owners, pinned);

  /// False: nothing is balanced. Parameters that nothing pins go to `default_partition`, and
  /// operators that nothing pins stay with the one before them.
  TORCH_ARG(bool, auto_partition) = true;
  TORCH_ARG(int, default_partition) = 0;

  /// Stages may stay without operators; for small evaluation functions in a long pipeline.
  TORCH_ARG(bool, allow_empty_stages) = false;
};

/// Divides the graph into contiguous stages along legal cuts (see `legal_cuts`), such that the
/// predicted step is as short as possible, up to `tolerance`:
///
///     sum t_s + (M - 1) max t_s,
///
/// where t_s is the cost of a stage's operators as a share of the whole graph's time, plus its ends
/// of the transfers (docs/partitioning.md). The same arguments give the same plan everywhere.
///
/// A cut that would send a view of a parameter is taken only if there is no plan without.
///
/// Pinned operators run where they are pinned (see `find_constraints`). Where the pins go back to
/// an earlier rank, that rank gets several stages. As few bytes as possible of all other owned
/// tensors are read elsewhere, which comes before balance: those reads become replicas.
///
/// Throws `PartitionError` if there is no such plan: it says how many stages are possible and why,
/// which pins are in the way, or which memory limit would do. The result has passed `verify_plan`.
Plan partition(const graph::Graph& graph, const PartitionOptions& options);

}  // namespace smp::partitioner
