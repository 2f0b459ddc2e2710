// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "partitioner/predict.h"

namespace smp::runtime {

class Optimizer;
class Runtime;

/// How much state the program's optimizers keep for parameters, for the partitioner's reckoning.
/// Belongs to the rank's thread. Internal.
class OptimizerStates {
 public:
  /// Counts an optimizer in as long as it lives.
  void add(const std::shared_ptr<const Optimizer>& optimizer);

  /// In the first step: takes the optimizers that there are, unless the configuration sets
  /// `optimizer_state_factor`. A parameter of none of them is given its default, and one of several
  /// has the state of each. All ranks take world rank 0's. Collective over the world.
  void settle(const Runtime& runtime);

  /// For the parameters of all models, masters of half precision included; nothing where the
  /// configuration says it, and before `settle`.
  const partitioner::StateFactors& factors() const { return factors_; }

 private:
  std::vector<std::weak_ptr<const Optimizer>> optimizers_;
  partitioner::StateFactors factors_;
};

}  // namespace smp::runtime
