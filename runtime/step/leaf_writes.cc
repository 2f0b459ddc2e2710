// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/leaf_writes.h"

#include "core/check.h"
#include "graph/leaf.h"
#include "graph/visit.h"
#include "runtime/update/precision.h"

namespace smp::runtime {

void check_leaf_writes(const Config& config, const graph::Graph& graph,
                       const std::string& step_name) {
  const bool has_masters = half_type(config).has_value();
  const bool divides = config.sharded_data_parallel_degree() > 1;
  if (!has_masters && !divides) return;
  for (const graph::Operator& op : graph.operators) {
    if (!graph::is_leaf(op.handle)) continue;
    const graph::LeafCallPtr leaf = graph::leaf_call(op.arguments[0].constant);
    if (!leaf->writes_parameters) continue;
    graph::for_each_argument(op, [&](graph::ValueId id) {
      const graph::Value& value = graph.values[id];
      if (value.kind != graph::ValueKind::kParameter) return;
      core::fail<UsageError>(
          "step function \"", step_name, "\": leaf module \"", leaf->module,
          "\" writes parameter \"", value.name, "\", ",
          has_masters ? "which has a master weight of float32. Train in float32"
                      : "which replicas divide. Set \"sharded_data_parallel_degree\" to 1",
          ", or call the module without smp::LeafWrites::kParameters");
    });
  }
}

}  // namespace smp::runtime
