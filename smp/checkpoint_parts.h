// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>
#include <vector>

#include "smp/export.h"

namespace smp {

class ModelCore;
class OptimizerCore;

namespace runtime {
class Model;
class Optimizer;
}  // namespace runtime

/// The models and optimizers of one checkpoint, for programs with several: `save`, `load` and the
/// like take it in the place of a model and its optimizer. The models and optimizers must outlive
/// it.
///
/// In the checkpoint the models are as one model, by the names of their tensors, and the optimizers
/// as one optimizer with the param groups of all. So the models have names
/// (`ModelOptions().name("generator")`), and no parameter is in two optimizers: the calls throw
/// `UsageError` for one that is. Averages (`smp::Ema`) of two models have the same name only if
/// they are updated equally often.
///
/// Example:
/// \code
///   const auto gan = smp::CheckpointParts()
///                        .add(generator, generator_optimizer)
///                        .add(critic, critic_optimizer);
///   auto run = smp::resume_from_checkpoint("runs", std::nullopt, gan,
///                                          smp::LoadOptions().begin_anew(true));
///   smp::save_checkpoint("runs", "step_100", gan);
/// \endcode
class SMP_API CheckpointParts {
 public:
  CheckpointParts() = default;
  /// For the library itself.
  CheckpointParts(std::vector<runtime::Model*> models, std::vector<runtime::Optimizer*> optimizers)
      : models_(std::move(models)), optimizers_(std::move(optimizers)) {}

  /// Adds a model.
  CheckpointParts& add(const ModelCore& model);
  /// Adds an optimizer, whose parameters are those of models that are added, too.
  CheckpointParts& add(const OptimizerCore& optimizer);
  /// Adds a model and its optimizer.
  CheckpointParts& add(const ModelCore& model, const OptimizerCore& optimizer);

  /// For the library itself: the models and optimizers that were added.
  const std::vector<runtime::Model*>& models() const { return models_; }
  const std::vector<runtime::Optimizer*>& optimizers() const { return optimizers_; }

 private:
  std::vector<runtime::Model*> models_;
  std::vector<runtime::Optimizer*> optimizers_;
};

}  // namespace smp
