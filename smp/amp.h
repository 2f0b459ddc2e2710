// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "smp/export.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace smp {
class OptimizerCore;
}  // namespace smp

namespace smp::amp {

/// Options of a `GradScaler`: the arguments of torch.amp.GradScaler, with its defaults.
struct GradScalerOptions {
  TORCH_ARG(double, init_scale) = 65536;
  /// Factor of the scale after `growth_interval` steps in a row without inf or NaN.
  TORCH_ARG(double, growth_factor) = 2;
  /// Factor of the scale after a step with inf or NaN.
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(int64_t, growth_interval) = 2000;
  /// False: `step` steps, and nothing else happens.
  TORCH_ARG(bool, enabled) = true;
};

/// torch.amp.GradScaler over all ranks, which libtorch lacks: multiplies the loss so that gradients
/// in float16 do not vanish, and skips steps whose gradients overflowed. Whether they did is agreed
/// upon by all ranks of the world, before any gradient is divided, so all ranks take or skip a step
/// together and have the same scale. All methods but `scale` are called outside of step functions;
/// `unscale_` and `step` are collective.
///
/// Also for a libtorch optimizer in a program without `init`.
///
/// Example:
/// \code
///   smp::amp::GradScaler scaler;
///   auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
///     torch::Tensor loss;
///     {
///       const Autocast autocast;  // of docs/precision.md
///       loss = torch::mse_loss(model(x), y);
///     }
///     model->backward(scaler.scale(loss));
///     return loss;
///   });
///   optimizer.zero_grad();
///   train(x, y);
///   scaler.step(optimizer);
///   scaler.update();
/// \endcode
///
/// Texts of errors are torch's. The scale in a step function is an input of the step, so another
/// scale is no other graph. Copies are the same scaler.
class SMP_API GradScaler {
 public:
  /// Made after `init` and outside of step functions. Throws `UsageError` for factors that do not
  /// grow or back off.
  explicit GradScaler(const GradScalerOptions& options = {});

  /// The tensor times the scale.
  at::Tensor scale(const at::Tensor& output) const;
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs) const;

  /// Divides the gradients of an optimizer's parameters by the scale, for code that clips or reads
  /// them before `step`. With inf or NaN somewhere they stay as they are, since `step` will skip.
  /// `Optimizer` is a `DistributedOptimizer`, a result of `smp::distributed`, or one of libtorch's.
  template <class Optimizer>
  void unscale_(Optimizer& optimizer) {
    unscale(handle_of(optimizer));
  }

  /// Calls `unscale_`, if that was not done, and the optimizer's `step()` unless a gradient of it
  /// is not finite on some rank. Returns its result, or nothing for a step that was skipped.
  template <class Optimizer>
  std::optional<at::Tensor> step(Optimizer& optimizer) {
    if (!begin_step(handle_of(optimizer))) return std::nullopt;
    return optimizer.step();
  }

  /// After all optimizers' steps: the scale backs off if some step was skipped, or grows.
  void update();
  /// Sets the scale.
  void update(double new_scale);

  /// 1 if not enabled.
  double get_scale() const;
  double get_growth_factor() const;
  void set_growth_factor(double factor);
  double get_backoff_factor() const;
  void set_backoff_factor(double factor);
  int64_t get_growth_interval() const;
  void set_growth_interval(int64_t interval);
  bool is_enabled() const;

  /// Text of JSON: {"scale", "growth_factor", "backoff_factor", "growth_interval",
  /// "_growth_tracker"}, as torch's; "{}" if not enabled. Between `update` and the next step.
  std::string state_dict() const;
  /// Throws `CheckpointError` for text of another form, and for that of a scaler that was not
  /// enabled.
  void load_state_dict(const std::string& state);

 private:
  /// An optimizer, with its type erased.
  struct Handle {
    const void* identity;
    std::function<std::vector<at::Tensor>()> gradients;
  };
  struct State;

  template <class Optimizer>
  static Handle handle_of(const Optimizer& optimizer) {
    if constexpr (std::is_base_of_v<OptimizerCore, Optimizer>) {
      return handle_of_distributed(optimizer);
    } else {
      return handle_of_plain(optimizer);
    }
  }
  static Handle handle_of_distributed(const OptimizerCore& optimizer);
  static Handle handle_of_plain(const torch::optim::Optimizer& optimizer);

  void unscale(const Handle& optimizer);
  /// Whether the optimizer shall step.
  bool begin_step(const Handle& optimizer);

  std::shared_ptr<State> state_;
};

}  // namespace smp::amp
