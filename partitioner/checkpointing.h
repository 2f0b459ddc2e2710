// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "partitioner/plan.h"
#include "partitioner/predict.h"

namespace smp::partitioner {

/// Modules whose operators run again in the backward pass instead of keeping until then the tensors
/// that autograd saves (graph/checkpointed_segment.h).
struct CheckpointedModules {
  std::vector<std::string> modules;  ///< dotted paths, in the order in which they are called
  int group = 1;  ///< how many neighbours on one stage run again together; 0: all of them
};

/// Per operator of a graph the number of its region, -1 for none. A region lies on one stage.
using Regions = std::vector<int>;

/// The regions of modules. The outermost of modules inside each other counts.
///
/// No libtorch module tells when it is called, so the operators of a module are those from the
/// first to the last one that reads its parameters, and those without parameters behind it, up to
/// the next operator that reads another module's. Operators behind the last parameter of the
/// program belong to no module: they are taken to be the loss. Any choice of operators gives the
/// same bits.
///
/// `stage_of_operator` is a plan's; empty: one stage. Empty where there are no regions.
Regions find_module_regions(const graph::Graph& graph,
                            const std::vector<CheckpointedModules>& modules,
                            const std::vector<int>& stage_of_operator = {});

/// The same graph with the costs that regions give it: a backward takes as much longer as the
/// forward takes that runs again, and a region's inputs are kept instead of its saved tensors.
/// `stage_of_operator` as above: values of another stage are counted with the transfers.
graph::Graph with_regions(const graph::Graph& graph, const Regions& regions,
                          const std::vector<int>& stage_of_operator = {});

/// Bytes that the largest region saves: a rank needs them in addition while that runs again.
/// `graph` has its costs without regions.
int64_t largest_region_bytes(const graph::Graph& graph, const Regions& regions);

/// The candidates for activation checkpointing: outermost modules with numeric names, as children
/// of containers have; elsewhere an operator's own module.
std::vector<std::string> candidate_modules(const graph::Graph& graph);

/// Adds candidates to `modules` until no rank is predicted to need more than `limit` bytes: on the
/// ranks that do, first those that free most bytes for the time that they run again. Nothing if all
/// are not enough. `graph` is in the plan's order, with its costs without regions. Candidates that
/// cannot run again are left out.
std::optional<std::vector<CheckpointedModules>> choose_modules(
    const graph::Graph& graph, const Plan& plan, const StepModel& step, int64_t limit,
    std::vector<CheckpointedModules> modules);

/// The prediction of a plan with these modules. `graph` as above.
Prediction predict_with(const graph::Graph& graph, const Plan& plan, const StepModel& step,
                        const std::vector<CheckpointedModules>& modules);

/// Throws `UsageError` unless all regions can run again (see `graph::why_not_repeatable`).
void check_repeatable(const graph::Graph& graph, const Regions& regions);

}  // namespace smp::partitioner
