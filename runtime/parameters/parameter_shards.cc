// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/parameter_shards.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "core/check.h"
#include "graph/alias_analysis.h"
#include "graph/visit.h"

namespace smp::runtime {

ParameterShards::ParameterShards(Runtime& runtime,
                                 const std::function<void(const ParameterTable::Entry&)>& prepare) {
  const Config& config = runtime.config();
  const core::Axis over = runtime.topology().pieces();
  const auto replicas = runtime.replicas();
  const auto split = [&](const char* name, const core::Axis& axis) {
    const std::vector<int> members = core::Axes{{axis}}.members(replicas->rank());
    return replicas->split(members, c10::str(name, members));
  };
  const auto [shards, same_shard] = core::Axis{1, replicas->size()}.split(over.size);
  replication_group_ = split("replication group", same_shard);
  parameters_ = std::make_shared<dp::ShardedParameters>(split("shards", shards));
  runtime.add_group(over, parameters_->group());
  for (const auto& entry : runtime.table().entries()) {
    prepare(entry);
    const bool divides = runtime.owns(entry) && entry.is_parameter() &&
                         entry.tensor.numel() >= config.sdp_param_persistence_threshold() &&
                         dp::ShardedParameters::is_divisible(entry.tensor) &&
                         !entry.shares_storage_in(runtime.table());
    if (divides) parameters_->add(entry.tensor, entry.name);
  }
  runtime.table().set_pieces(parameters_, over);
  const std::string own = nlohmann::json(parameters_->names()).dump();
  for (const auto& text : comm::all_gather_bytes(*runtime.group(CommGroup::kPp), own)) {
    divided_.merge(nlohmann::json::parse(text).get<std::set<std::string>>());
  }
}

std::vector<std::optional<size_t>> ParameterShards::shard_of_value(
    const Runtime& runtime, const graph::Graph& graph) const {
  std::vector<std::optional<size_t>> result;
  for (const graph::Value& value : graph.values) {
    const bool is_parameter = value.kind == graph::ValueKind::kParameter;
    result.push_back(is_parameter ? runtime.table().at(value.name).shard() : std::nullopt);
  }
  return result;
}

std::vector<size_t> gradient_order(const Runtime& runtime, const graph::Graph& graph,
                                   const std::vector<graph::ValueId>& values) {
  const auto shard_of_value = runtime.parameter_shards()->shard_of_value(runtime, graph);
  const graph::AliasAnalysis aliases(graph);
  std::set<size_t> wanted;
  for (graph::ValueId id : values) {
    if (shard_of_value[id]) wanted.insert(*shard_of_value[id]);
  }
  std::vector<size_t> order;
  for (const graph::Operator& op : graph.operators) {
    graph::for_each_argument(op, [&](graph::ValueId id) {
      const graph::ValueId base = aliases.of(id).base;
      const auto shard = base == graph::kUndefined ? std::nullopt : shard_of_value[base];
      if (shard && wanted.erase(*shard) > 0) order.push_back(*shard);
    });
  }
  order.insert(order.end(), wanted.begin(), wanted.end());  // where the backward begins
  // A gradient is complete when the backward has passed the first use.
  std::reverse(order.begin(), order.end());
  return order;
}

}  // namespace smp::runtime
