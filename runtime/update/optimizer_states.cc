// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/optimizer_states.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/precision.h"
#include "runtime/update/master_weights.h"
#include "runtime/update/optimizer.h"

namespace smp::runtime {
namespace {

/// Bytes of state for each byte of a parameter, given how many tensors of its size are kept.
double factor_of(double tensors, const at::Tensor& parameter, const Config& config) {
  const bool has_master = half_type(config) && MasterWeights::concerns(parameter);
  if (!has_master) return tensors;
  return (tensors + 1) * sizeof(float) / static_cast<double>(parameter.element_size());
}

/// The factors of parameters by name, on this rank; of several optimizers they add up.
partitioner::StateFactors known_factors(const Config& config, const ParameterTable& table,
                                        const Living<const Optimizer>& optimizers) {
  partitioner::StateFactors factors;
  for (const auto& optimizer : optimizers.all()) {
    optimizer->for_each_state([&](const at::Tensor& parameter, int64_t tensors) {
      const auto* entry = table.find(parameter);
      if (entry == nullptr) return;
      factors[entry->name] += factor_of(static_cast<double>(tensors), entry->tensor, config);
    });
  }
  return factors;
}

}  // namespace

partitioner::StateFactors agree_on_state_factors(const Job& job, const ParameterTable& table,
                                                 const Living<const Optimizer>& optimizers) {
  const Config& config = job.config();
  const auto known = known_factors(config, table, optimizers);
  std::vector<std::string> names;
  std::vector<double> factors;
  for (const auto& entry : table.entries()) {
    if (!entry.is_parameter()) continue;
    const auto found = known.find(entry.name);
    names.push_back(entry.name);
    factors.push_back(found != known.end()
                          ? found->second
                          : factor_of(config.optimizer_state_factor(), entry.tensor, config));
  }
  // Ranks may have the value alike, and only some of them by default: so rank 0 says that, too.
  if (config.is_set("optimizer_state_factor")) factors.clear();
  const std::string text = nlohmann::json(factors).dump();
  factors = nlohmann::json::parse(comm::broadcast_bytes(*job.world(), text, 0))
                .get<std::vector<double>>();
  partitioner::StateFactors agreed;
  for (size_t i = 0; i < factors.size(); ++i) agreed[names[i]] = factors[i];
  return agreed;
}

}  // namespace smp::runtime
