// SPDX-License-Identifier: Apache-2.0
#include "runtime/update/optimizer_states.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/precision.h"
#include "runtime/runtime.h"
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
partitioner::StateFactors known_factors(
    const Runtime& runtime, const std::vector<std::weak_ptr<const Optimizer>>& optimizers) {
  partitioner::StateFactors factors;
  for (const auto& optimizer : optimizers) {
    const auto alive = optimizer.lock();
    if (alive == nullptr) continue;
    alive->for_each_state([&](const at::Tensor& parameter, int64_t tensors) {
      const auto* entry = runtime.table().find(parameter);
      if (entry == nullptr) return;
      factors[entry->name] +=
          factor_of(static_cast<double>(tensors), entry->tensor, runtime.config());
    });
  }
  return factors;
}

}  // namespace

void OptimizerStates::add(const std::shared_ptr<const Optimizer>& optimizer) {
  optimizers_.erase(std::remove_if(optimizers_.begin(), optimizers_.end(),
                                   [](const auto& known) { return known.expired(); }),
                    optimizers_.end());
  optimizers_.push_back(optimizer);
}

void OptimizerStates::settle(const Runtime& runtime) {
  const Config& config = runtime.config();
  const auto known = known_factors(runtime, optimizers_);
  std::vector<std::string> names;
  std::vector<double> factors;
  for (const auto& entry : runtime.table().entries()) {
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
  factors = nlohmann::json::parse(comm::broadcast_bytes(*runtime.world(), text, 0))
                .get<std::vector<double>>();
  for (size_t i = 0; i < factors.size(); ++i) factors_[names[i]] = factors[i];
}

}  // namespace smp::runtime
