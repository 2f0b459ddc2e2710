#pragma once

#include <nlohmann/json.hpp>

#include "smp/loss_scaler.h"

namespace smp {

/// What a `DistributedOptimizer` offers for training in half precision, by SMP's names; see
/// docs/precision.md. `Optimizer` derives from it and has `core()`.
template <class Optimizer>
class MixedPrecision {
 public:
  /// Has `model->backward` multiply the loss, and `step()` divide the gradients, by a scale, static
  /// or dynamic; `step()` then does nothing where a gradient is not finite on some rank. Before the
  /// first step. Throws `UsageError` if another optimizer scales the loss.
  void scale_loss(const LossScaleOptions& options) { scaling().start(options); }

  /// Whether the last step was skipped because a gradient was not finite, on any rank; or will be,
  /// after `clip_master_grads`. Schedulers then do not step.
  bool overflow() const { return scaling().overflow(); }
  /// By what the loss is multiplied.
  double loss_scale() const { return scaling().loss_scale(); }

  /// Divides the gradients by the loss scale and scales them so that the norm over all of them is
  /// at most `max_norm`. Returns the norm there was, or -1 after an overflow. Between the step
  /// function and `step()`; collective over the world.
  double clip_master_grads(double max_norm, double norm_type = 2) {
    return core().clip_master_grads(max_norm, norm_type);
  }

  /// Gives master weights the values that the parameters have now: for programs that have written
  /// into parameters. `load_state_dict` and `smp::load` do so by themselves.
  void reload_model_params() { core().reload_model_params(); }

  /// Where a dynamic loss scale stands; empty without one. `smp::save` has it.
  /// `load_loss_scaler_state` takes it back, and does nothing where the optimizer or the state has
  /// none. Throws `CheckpointError` for JSON of another form.
  nlohmann::json loss_scaler_state() const { return scaling().state(); }
  void load_loss_scaler_state(const nlohmann::json& state) { scaling().load_state(state); }

 private:
  auto& core() const { return static_cast<const Optimizer&>(*this).core(); }
  auto& scaling() const { return core().loss_scaling(); }
};

}  // namespace smp
