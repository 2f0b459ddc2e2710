// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/leaf_writes.h"

#include "core/check.h"
#include "graph/leaf.h"
#include "graph/visit.h"
#include "runtime/precision.h"

namespace smp::runtime {

namespace {

/// Calls `refuse(reason...)` if the leaf must not write parameters.
template <class Refuse>
void check(const Config& config, int replicas, const graph::LeafCall& leaf, const Refuse& refuse) {
  if (half_type(config)) refuse("which has a master weight of float32. Train in float32");
  if (config.sharded_data_parallel_degree() > 1) {
    refuse("which replicas divide. Set \"sharded_data_parallel_degree\" to 1");
  }
  if (leaf.writes_by_batch && replicas > 1) {
    refuse("by its batch, of which each of ", replicas,
           " replicas has another, so that they would part. Train one replica");
  }
}

}  // namespace

void check_leaf_writes(const Config& config, int replicas, const graph::Graph& graph,
                       const std::string& step_name) {
  for (const graph::Operator& op : graph.operators) {
    if (!graph::is_leaf(op.handle)) continue;
    const graph::LeafCallPtr leaf = graph::leaf_call(op.arguments[0].constant);
    if (!leaf->writes_parameters) continue;
    graph::for_each_argument(op, [&](graph::ValueId id) {
      const graph::Value& value = graph.values[id];
      if (value.kind != graph::ValueKind::kParameter) return;
      check(config, replicas, *leaf, [&](const auto&... reason) {
        core::fail<UsageError>("step function \"", step_name, "\": leaf module \"", leaf->module,
                               "\" writes parameter \"", value.name, "\", ", reason...,
                               ", or call a module that only reads its parameters");
      });
    });
  }
}

}  // namespace smp::runtime
