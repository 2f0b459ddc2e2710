// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <tuple>

#include "smp/export.h"
#include "smp/optim/own_options.h"
#include "smp/optim/uses_grad_norm.h"
#include "smp/optim/uses_tensor_norms.h"

namespace smp::optim {

/// Options of `Lamb`; names and defaults are those of FusedLAMB in NVIDIA's apex.
struct SMP_API LambOptions
    : public Fieldwise<LambOptions, torch::optim::OptimizerCloneableOptions<LambOptions>> {
  LambOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor)
  TORCH_ARG(double, lr) = 1e-3;
  using betas_t = std::tuple<double, double>;
  /// Decay of the running averages of the gradient and of its square, in [0, 1).
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the root of the second average.
  TORCH_ARG(double, eps) = 1e-6;
  /// Times the parameter, added to its update, or to its gradient without `adam_w_mode`.
  TORCH_ARG(double, weight_decay) = 0.01;
  /// Divide the averages by 1 - beta^step.
  TORCH_ARG(bool, bias_correction) = true;
  /// Weigh a gradient by 1 - beta1 in the first average; false: by 1.
  TORCH_ARG(bool, grad_averaging) = true;
  /// Weight decay is no part of the averages.
  TORCH_ARG(bool, adam_w_mode) = true;
  /// Divide gradients by norm / max_grad_norm where the L2 norm of all gradients of the optimizer
  /// is larger. 0: never.
  TORCH_ARG(double, max_grad_norm) = 1;
  /// Adapt the rate of parameters without weight decay, too.
  TORCH_ARG(bool, use_nvlamb) = false;

 public:
  /// Lists the fields for `Fieldwise`.
  template <class Of, class Visit>
  static void visit_fields(Of& of, const Visit& visit) {
    visit("lr", of.lr());
    visit("betas", of.betas());
    visit("eps", of.eps());
    visit("weight_decay", of.weight_decay());
    visit("bias_correction", of.bias_correction());
    visit("grad_averaging", of.grad_averaging());
    visit("adam_w_mode", of.adam_w_mode());
    visit("max_grad_norm", of.max_grad_norm());
    visit("use_nvlamb", of.use_nvlamb());
  }
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
  /// Throws ConfigError for an option out of range.
  void check() const;
};

/// State of one parameter.
struct SMP_API LambParamState
    : public Fieldwise<LambParamState, torch::optim::OptimizerCloneableParamState<LambParamState>> {
  LambParamState() = default;
  /// That of a parameter before its first step.
  explicit LambParamState(const torch::Tensor& param);
  /// Steps done.
  TORCH_ARG(int64_t, step) = 0;
  /// Running average of gradients.
  TORCH_ARG(torch::Tensor, exp_avg);
  /// Running average of squared gradients.
  TORCH_ARG(torch::Tensor, exp_avg_sq);

 public:
  /// Lists the fields for `Fieldwise`.
  template <class Of, class Visit>
  static void visit_fields(Of& of, const Visit& visit) {
    visit("step", of.step());
    visit("exp_avg", of.exp_avg());
    visit("exp_avg_sq", of.exp_avg_sq());
  }
};

/// LAMB, for large batches (Y. You et al., "Large Batch Optimization for Deep Learning: Training
/// BERT in 76 minutes", arXiv:1904.00962, algorithm 2), as in apex's FusedLAMB. With the gradient g
/// clipped by the norm of all, for each parameter x:
///
///     m = beta1 m + (1 - beta1) g
///     v = beta2 v + (1 - beta2) g^2
///     u = m' / (sqrt(v') + eps) + weight_decay x       m', v': corrected for their bias
///     x = x - lr |x| / |u| u
///
/// where the ratio of L2 norms is 1 if either is 0, and for parameters without weight decay unless
/// `use_nvlamb`. Under `DistributedOptimizer` norms are those over all ranks, so that `step` is
/// collective. It needs the memory for the updates of all parameters of the rank.
class SMP_API Lamb : public OwnOptimizer<LambOptions, LambParamState>,
                     public UsesGradNorm,
                     public UsesTensorNorms {
 public:
  using OwnOptimizer::OwnOptimizer;

  /// Updates every parameter that has a gradient. Throws UsageError on a sparse gradient.
  torch::Tensor step(LossClosure closure = nullptr) override;

 private:
  double norm_of_gradients() const;
};

}  // namespace smp::optim
