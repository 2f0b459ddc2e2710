// SPDX-License-Identifier: Apache-2.0
#include "tools/shrink.h"

#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>

#include "core/topology.h"
#include "smp/error.h"

namespace smp::tools {
namespace {

/// Whether the configuration allows the layout.
bool is_valid(const Config& config, const Layout& layout) {
  try {
    const Config changed = Config::from_json(layout.put_into(config.to_json()), "smprun");
    changed.validate();
    core::Topology::check_size(changed, layout.ranks);
  } catch (const ConfigError&) {
    return false;
  }
  return true;
}

std::string counted(int64_t count, const char* what, const char* plural = "s") {
  return c10::str(count, " ", what, count == 1 ? "" : plural);
}

}  // namespace

std::string Layout::to_text() const {
  const int64_t model = partitions * tensor_parallel_degree;
  std::string text = counted(ranks, "rank") + ": " + counted(partitions, "stage");
  if (tensor_parallel_degree > 1) text += c10::str(" x ", tensor_parallel_degree, " parts");
  return text + " x " + counted(ranks / model, "replica") + ", " +
         counted(microbatches, "microbatch", "es");
}

std::string Layout::put_into(const std::string& json) const {
  auto parameters = nlohmann::json::parse(json);
  parameters.erase("pipeline_parallel_degree");  // another name of "partitions"
  parameters["partitions"] = partitions;
  parameters["microbatches"] = microbatches;
  parameters["gradient_shards"] = gradient_shards;
  return parameters.dump();
}

std::optional<Layout> shrink(const Config& config, int ranks) {
  Layout layout;
  layout.partitions = config.partitions();
  layout.tensor_parallel_degree = config.tensor_parallel_degree();
  const int64_t tensor = layout.tensor_parallel_degree;
  const int64_t replicas = ranks / (layout.partitions * tensor);
  const int64_t batches = replicas * (config.prescaled_batch() ? 1 : tensor);
  layout.gradient_shards = config.gradient_shards() > 0 ? config.gradient_shards() : batches;
  for (int64_t fewer = replicas - 1; fewer > 0; --fewer) {
    if (replicas % fewer != 0) continue;
    layout.ranks = static_cast<int>(layout.partitions * tensor * fewer);
    layout.microbatches = config.microbatches() * (replicas / fewer);
    if (is_valid(config, layout)) return layout;
  }
  layout.microbatches = config.microbatches() * replicas;
  if (!config.auto_partition()) return std::nullopt;  // the program names its stages
  while (--layout.partitions > 0) {
    layout.ranks = static_cast<int>(layout.partitions * tensor);
    if (is_valid(config, layout)) return layout;
  }
  return std::nullopt;
}

}  // namespace smp::tools
