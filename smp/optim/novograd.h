// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <tuple>

#include "smp/export.h"
#include "smp/optim/own_options.h"
#include "smp/optim/uses_tensor_norms.h"

namespace smp::optim {

/// Options of `NovoGrad`; names and defaults are those of FusedNovoGrad in NVIDIA's apex.
struct SMP_API NovoGradOptions
    : public Fieldwise<NovoGradOptions, torch::optim::OptimizerCloneableOptions<NovoGradOptions>> {
  NovoGradOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor)
  TORCH_ARG(double, lr) = 1e-3;
  using betas_t = std::tuple<double, double>;
  /// Decay of the running averages of the gradient and of its norm, in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the average of norms.
  TORCH_ARG(double, eps) = 1e-8;
  /// Times the parameter, added to its update.
  TORCH_ARG(double, weight_decay) = 0;
  /// Divide the averages by 1 - beta1^step and sqrt(1 - beta2^step).
  TORCH_ARG(bool, bias_correction) = true;
  /// Divide by the norm and decay inside of the first average, as in the paper; false: after it.
  TORCH_ARG(bool, reg_inside_moment) = false;
  /// Weigh a gradient by 1 - beta1 in the first average; false: by 1.
  TORCH_ARG(bool, grad_averaging) = true;
  /// 2: the L2 norm of each gradient; 0: its largest magnitude.
  TORCH_ARG(int64_t, norm_type) = 2;
  /// The average of norms begins with 0; false: with the first norm.
  TORCH_ARG(bool, init_zero) = false;

 public:
  /// Lists the fields for `Fieldwise`.
  template <class Of, class Visit>
  static void visit_fields(Of& of, const Visit& visit) {
    visit("lr", of.lr());
    visit("betas", of.betas());
    visit("eps", of.eps());
    visit("weight_decay", of.weight_decay());
    visit("bias_correction", of.bias_correction());
    visit("reg_inside_moment", of.reg_inside_moment());
    visit("grad_averaging", of.grad_averaging());
    visit("norm_type", of.norm_type());
    visit("init_zero", of.init_zero());
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
  /// Throws ConfigError for an option out of range.
  void check() const;
};

/// State of one parameter.
struct SMP_API NovoGradParamState
    : public Fieldwise<NovoGradParamState,
                       torch::optim::OptimizerCloneableParamState<NovoGradParamState>> {
  NovoGradParamState() = default;
  /// That of a parameter before its first step.
  explicit NovoGradParamState(const torch::Tensor& param);
  /// Steps done.
  TORCH_ARG(int64_t, step) = 0;
  /// Running average of gradients.
  TORCH_ARG(torch::Tensor, exp_avg);
  /// Running average of the norms of gradients, the root of that of their squares for L2.
  TORCH_ARG(double, grad_norm) = 0;

 public:
  /// Lists the fields for `Fieldwise`.
  template <class Of, class Visit>
  static void visit_fields(Of& of, const Visit& visit) {
    visit("step", of.step());
    visit("exp_avg", of.exp_avg());
    visit("grad_norm", of.grad_norm());
  }
};

/// NovoGrad, which has one second moment for each parameter (B. Ginsburg et al., "Stochastic
/// Gradient Methods with Layer-wise Adaptive Moments for Training of Deep Networks",
/// arXiv:1905.11286), as in apex's FusedNovoGrad. For each parameter x with gradient g:
///
///     n = sqrt(beta2 n^2 + (1 - beta2) |g|^2)          n = |g| at first
///     m = beta1 m + (1 - beta1) g
///     x = x - lr (m' / (n' + eps) + weight_decay x)    m', n': corrected for their bias
///
/// With `reg_inside_moment`: m = beta1 m + (1 - beta1) (g / (n' + eps) + weight_decay x) and
/// x = x - lr m'. With the largest magnitude as norm: n = beta2 n + (1 - beta2) |g|. Under
/// `DistributedOptimizer`, where ranks have pieces or parts of parameters, norms are those of the
/// whole, so that `step` is collective.
class SMP_API NovoGrad : public OwnOptimizer<NovoGradOptions, NovoGradParamState>,
                         public UsesTensorNorms {
 public:
  using OwnOptimizer::OwnOptimizer;

  /// Updates every parameter that has a gradient. Throws UsageError on a sparse gradient.
  torch::Tensor step(LossClosure closure = nullptr) override;

 private:
  std::vector<double> norms_of_gradients();
};

}  // namespace smp::optim
