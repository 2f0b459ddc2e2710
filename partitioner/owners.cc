#include "partitioner/owners.h"

#include <algorithm>

#include "partitioner/data_flow.h"
#include "partitioner/gradient_flow.h"
#include "smp/core/error.h"

namespace smp::partitioner {

using graph::Graph;
using graph::ValueId;
using graph::ValueKind;

OwnerConstraints owner_constraints(const Graph& graph, const std::map<std::string, int>& owner,
                                   int stages) {
  OwnerConstraints result;
  if (owner.empty()) return result;
  const std::vector<std::vector<int>> uses = value_uses(graph);
  const std::vector<int> writers = last_writers(graph);
  const GradientFlow gradients(graph);
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const graph::Value& value = graph.values[v];
    if (value.kind != ValueKind::kParameter && value.kind != ValueKind::kBuffer) continue;
    const auto found = owner.find(value.name);
    if (found == owner.end() || (uses[v].empty() && writers[v] < 0)) continue;
    const int stage = found->second;
    const auto id = static_cast<ValueId>(v);
    SMP_CHECK_WITH(PartitionError, stage >= 0 && stage < stages, "cannot partition: ",
                   describe_value(graph, id), " belongs to stage ", stage,
                   ", but the stages are 0 to ", stages - 1,
                   ". Use as many stages as for the first step function.");
    if (writers[v] >= 0) {
      result.pins.push_back({writers[v], stage, id});
    } else if (!gradients.gradient_uses(id).empty()) {
      result.pins.push_back({uses[v].front(), stage, id});
    } else {
      result.better_local.push_back(id);
    }
  }
  std::stable_sort(result.pins.begin(), result.pins.end(),
                   [](const Pin& a, const Pin& b) { return a.operator_index < b.operator_index; });
  return result;
}

}  // namespace smp::partitioner
