// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/serialize.h"
#include "smp/config.h"
#include "tools/forecast.h"

namespace smp::tools {

/// The plan for people, given the graph in its order: the partitioner's report; per stage times and
/// memory; the values that cross each edge; the cuts; the predicted step.
std::string to_text(const graph::Graph& graph, const Forecast& forecast);

/// The same as JSON. Times are in us, sizes in bytes; docs/partitioning.md describes it.
nlohmann::ordered_json to_json(const graph::Graph& graph, const Forecast& forecast);

/// A plan for a number of partitions, or why there is none.
struct Alternative {
  int partitions = 1;
  std::optional<Forecast> forecast;
  std::string problem;
};

/// Plans for each number of partitions, with so many replicas, otherwise as `config` says.
std::vector<Alternative> plan_alternatives(const graph::SavedGraph& saved, const Config& config,
                                           const std::vector<int>& partitions, int replicas);

/// A table with a line for each.
std::string to_text(const graph::Graph& graph, const std::vector<Alternative>& alternatives);
nlohmann::ordered_json to_json(const graph::Graph& graph,
                               const std::vector<Alternative>& alternatives);

}  // namespace smp::tools
