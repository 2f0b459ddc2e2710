#pragma once

#include <torch/arg.h>

#include <map>
#include <string>

#include "graph/graph.h"
#include "partitioner/plan.h"

namespace smp::partitioner {

/// Which stage owns a parameter or buffer, by name.
using Owners = std::map<std::string, int>;

/// How a graph is divided among the ranks of a pipeline.
struct PartitionOptions {
  explicit PartitionOptions(int stages = 1) : stages_(stages) {}

  /// Number of stages.
  TORCH_ARG(int, stages);

  /// Weight of memory against time in an operator's cost, 0 to 1: see `operator_costs`.
  TORCH_ARG(double, memory_weight) = 0.8;

  /// How far the costliest stage may be above the optimum if that saves bytes between stages, as
  /// a fraction. The default is below the noise of measured times.
  TORCH_ARG(double, tolerance) = 0.01;

  /// Owners settled by an earlier plan of the same program. Names that the graph does not read are
  /// ignored.
  TORCH_ARG(Owners, owner);

  /// Stages may stay without operators; for small evaluation functions in a long pipeline.
  TORCH_ARG(bool, allow_empty_stages) = false;
};

/// Divides the graph into contiguous stages along legal cuts (see `legal_cuts`), such that the
/// costliest stage costs as little as possible; then with few bytes across the boundaries; then
/// with early cuts. The same arguments give the same plan everywhere.
///
/// A cut that would send a view of a parameter is taken only if there is no plan without.
///
/// With settled owners, a parameter that gets a gradient is first read on its owner's stage, and
/// whatever the graph writes is written there. Of all other tensors with an owner as few bytes as
/// possible are read elsewhere, which comes before balance: those reads become replicas.
///
/// Throws `PartitionError` if there is no such plan: it says how many stages are possible and
/// why, or which settled owner is in the way. The result has passed `verify_plan`.
Plan partition(const graph::Graph& graph, const PartitionOptions& options);

}  // namespace smp::partitioner
