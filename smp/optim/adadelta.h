// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>

#include "smp/export.h"
#include "smp/optim/own_options.h"

namespace smp::optim {

/// Options of `Adadelta`; the defaults are PyTorch's.
struct SMP_API AdadeltaOptions
    : public Fieldwise<AdadeltaOptions, torch::optim::OptimizerCloneableOptions<AdadeltaOptions>> {
  AdadeltaOptions(double lr = 1.0) : lr_(lr) {}  // NOLINT(google-explicit-constructor)
  /// Scales the update; the published method has 1.
  TORCH_ARG(double, lr) = 1.0;
  /// Decay of the two running averages, in [0, 1].
  TORCH_ARG(double, rho) = 0.9;
  /// Added under both square roots.
  TORCH_ARG(double, eps) = 1e-6;
  /// Times the parameter, added to its gradient.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  /// Lists the fields for `Fieldwise`.
  template <class Of, class Visit>
  static void visit_fields(Of& of, const Visit& visit) {
    visit("lr", of.lr());
    visit("rho", of.rho());
    visit("eps", of.eps());
    visit("weight_decay", of.weight_decay());
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
  /// Throws ConfigError for an option out of range.
  void check() const;
};

/// State of one parameter.
struct SMP_API AdadeltaParamState
    : public Fieldwise<AdadeltaParamState,
                       torch::optim::OptimizerCloneableParamState<AdadeltaParamState>> {
  AdadeltaParamState() = default;
  /// That of a parameter before its first step.
  explicit AdadeltaParamState(const torch::Tensor& param);
  /// Steps done.
  TORCH_ARG(int64_t, step) = 0;
  /// Running average of squared gradients, E[g^2].
  TORCH_ARG(torch::Tensor, square_avg);
  /// Running average of squared updates, E[dx^2].
  TORCH_ARG(torch::Tensor, acc_delta);

 public:
  /// Lists the fields for `Fieldwise`.
  template <class Of, class Visit>
  static void visit_fields(Of& of, const Visit& visit) {
    visit("step", of.step());
    visit("square_avg", of.square_avg());
    visit("acc_delta", of.acc_delta());
  }
};

/// Adadelta, which libtorch lacks in C++ (M. D. Zeiler, "ADADELTA: An Adaptive Learning Rate
/// Method", arXiv:1212.5701, algorithm 1):
///
///     E[g^2]  = rho E[g^2] + (1 - rho) g^2
///     dx      = sqrt(E[dx^2] + eps) / sqrt(E[g^2] + eps) g
///     E[dx^2] = rho E[dx^2] + (1 - rho) dx^2
///     x       = x - lr dx
///
/// Otherwise like libtorch's own optimizers: param groups, closures, LR schedulers, torch::save.
class SMP_API Adadelta : public OwnOptimizer<AdadeltaOptions, AdadeltaParamState> {
 public:
  using OwnOptimizer::OwnOptimizer;

  /// Updates every parameter that has a gradient. Throws UsageError on a sparse gradient.
  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace smp::optim
