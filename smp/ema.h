// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <string>

#include "smp/detail/plain_arguments.h"
#include "smp/export.h"

namespace smp {

class ModelCore;
class OptimizerCore;

namespace runtime {
class Average;
}  // namespace runtime

/// Options of an `Ema`.
struct EmaOptions {
  /// The share of the average that an update leaves: at least 0 and below 1.
  TORCH_ARG(double, decay) = 0.999;
  /// Names it in checkpoints; averages of one model have different names.
  TORCH_ARG(std::string, name) = "ema";
};

/// An exponential moving average of a `DistributedModel`'s parameters: the weights that many models
/// are evaluated with. Each rank averages the values that it updates, so that the average is
/// divided as the optimizer's state is, by `shard_optimizer_state` too; for parameters in half
/// precision it is in float32. The first update copies the parameters; each further one is
/// `average.lerp_(parameter, 1 - decay)`, as torch.optim.swa_utils.AveragedModel does it by
/// `get_ema_multi_avg_fn`, so the bits are those of that loop in one process. Buffers are the
/// model's.
///
/// `save` and `keep_copy` store it with the model, and `load`, `resume_from_checkpoint` and
/// `resume_after_restart` bring it back, in any layout: make it before they are called, on all
/// ranks, and update it on all alike. Saves throw `UsageError` where ranks have other averages or
/// numbers of updates. After `model->join()` replicas that ran out of batches have the average of
/// one that was last.
///
/// Example:
/// \code
///   smp::Ema ema(model, optimizer, smp::EmaOptions().decay(0.999));
///   smp::load("checkpoints/gpt", model, optimizer);
///   for (...) {
///     train(x, y);
///     optimizer.step();
///     ema.update();
///   }
///   {
///     const auto averaged = ema.averaged();
///     validate(x, y);
///   }
/// \endcode
class SMP_API Ema {
 public:
  /// The parameters have the values of the average until this ends.
  class SMP_API Averaged {
   public:
    explicit Averaged(std::shared_ptr<runtime::Average> average);
    ~Averaged();
    Averaged(const Averaged&) = delete;
    Averaged& operator=(const Averaged&) = delete;

   private:
    std::shared_ptr<runtime::Average> average_;
  };

  /// Averages the parameters. Throws `UsageError` before `smp::init`, for a decay out of range, for
  /// a name that is empty, too long, no UTF-8 or has a "/" or control characters, and for the name
  /// of another average of the model.
  explicit Ema(const ModelCore& model, const EmaOptions& options = {});
  /// Averages the master weights, which `optimizer` has with `fp16` or `bf16`, so that updates
  /// below the last digit of half precision count; otherwise the parameters. The optimizer that
  /// `optimizer` wraps must outlive this.
  Ema(const ModelCore& model, const OptimizerCore& optimizer, const EmaOptions& options = {});
  /// Does not compile: names the argument to pass instead of a plain module or optimizer.
  template <class... Arguments, class = detail::IfPlain<Arguments...>>
  explicit Ema(const Arguments&...) {
    detail::refuse_plain_between_steps<Arguments...>();
  }
  Ema(const Ema&) = delete;
  Ema& operator=(const Ema&) = delete;

  /// Adds the current parameters to the average. Called after each `optimizer.step()`, on all
  /// ranks. Not collective. Throws `UsageError` inside a step function, before the first step and
  /// while `averaged()` lives.
  void update() const;
  /// How many updates the average has had, those of a checkpoint that was loaded too.
  int64_t updates() const;

  /// Gives the parameters the values of the average, rounded where they are of half precision,
  /// until the result ends: for step functions that evaluate, for `model->state_dict()`, and for
  /// saves without the optimizer (`save_checkpoint` with `partial(false)`, `save_pretrained`),
  /// which then have the averaged weights as the model's. Train nothing meanwhile. It takes the
  /// memory of this rank's parameters once more. Before the first update the values stay as they
  /// are.
  ///
  /// All ranks call it; collective over the replicas with `shard_optimizer_state`. Throws as
  /// `update`. Meanwhile calls that would change or replace parameters, or save them as the trained
  /// ones, throw `UsageError`: `optimizer.step`, `reload_model_params` and `load_state_dict`,
  /// `model->load_state_dict` and `cpu`, `load`, `load_pretrained`, and saves with an optimizer.
  [[nodiscard]] Averaged averaged() const;

 private:
  std::shared_ptr<runtime::Average> average_;
};

}  // namespace smp
