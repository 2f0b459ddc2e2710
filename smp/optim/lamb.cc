// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/lamb.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>

#include "optim/grad_norm.h"
#include "optim/step_parts.h"

namespace smp::optim {
namespace {

/// The gradient, clipped by `norm` and, without `adam_w_mode`, with the weight decay.
torch::Tensor prepare_gradient(const torch::Tensor& param, const LambOptions& options,
                               double norm) {
  torch::Tensor grad = param.grad();
  if (options.max_grad_norm() > 0 && norm > options.max_grad_norm()) {
    grad = grad.div(norm / options.max_grad_norm());
  }
  if (!options.adam_w_mode() && options.weight_decay() != 0) {
    grad = grad.add(param, options.weight_decay());
  }
  return grad;
}

/// The decrease of the parameter at a rate of 1.
torch::Tensor update_averages(const torch::Tensor& param, const torch::Tensor& grad,
                              const LambOptions& options, LambParamState& state) {
  const auto [beta1, beta2] = options.betas();
  state.step(state.step() + 1);
  state.exp_avg().mul_(beta1).add_(grad, options.grad_averaging() ? 1 - beta1 : 1);
  state.exp_avg_sq().mul_(beta2).addcmul_(grad, grad, 1 - beta2);
  const auto steps = static_cast<double>(state.step());
  const double correction1 = options.bias_correction() ? 1 - std::pow(beta1, steps) : 1;
  const double correction2 = options.bias_correction() ? 1 - std::pow(beta2, steps) : 1;
  const torch::Tensor root = state.exp_avg_sq().div(correction2).sqrt_().add_(options.eps());
  torch::Tensor update = state.exp_avg().div(correction1).div_(root);
  if (options.adam_w_mode() && options.weight_decay() != 0) {
    update.add_(param, options.weight_decay());
  }
  return update;
}

/// How much of the rate a parameter gets, by its norm and that of its update.
double trust_ratio(double of_param, double of_update, const LambOptions& options) {
  if (!options.use_nvlamb() && options.weight_decay() == 0) return 1;
  return of_param != 0 && of_update != 0 ? of_param / of_update : 1;
}

}  // namespace

void LambOptions::check() const {
  detail::check_adam_options("Lamb", *this);
  detail::check_option(max_grad_norm() >= 0, "Lamb", "max_grad_norm", "at least 0",
                       max_grad_norm());
}

LambParamState::LambParamState(const torch::Tensor& param)
    : exp_avg_(at::zeros_like(param, at::MemoryFormat::Preserve)),
      exp_avg_sq_(at::zeros_like(param, at::MemoryFormat::Preserve)) {}

/// 0 where no group clips.
double Lamb::norm_of_gradients() const {
  const bool clips = std::any_of(param_groups_.begin(), param_groups_.end(), [](const auto& group) {
    return static_cast<const LambOptions&>(group.options()).max_grad_norm() > 0;
  });
  if (!clips) return 0;
  return grad_norm_(parameters_of(*this)).item<double>();
}

torch::Tensor Lamb::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss = detail::loss_of(closure);
  const double norm = norm_of_gradients();
  std::vector<TensorOfParameter> params, updates;
  std::vector<const LambOptions*> options_of;
  detail::for_each_gradient<LambOptions>(
      param_groups_, "Lamb", [&](const torch::Tensor& param, const LambOptions& options) {
        const torch::Tensor grad = prepare_gradient(param, options, norm);
        params.push_back({param, param});
        updates.push_back({param, update_averages(param, grad, options, state_of(param))});
        options_of.push_back(&options);
      });
  constexpr double kL2 = 2;
  const auto of_params = tensor_norms_(params, kL2), of_updates = tensor_norms_(updates, kL2);
  for (size_t i = 0; i < updates.size(); ++i) {
    const double ratio = trust_ratio(of_params[i], of_updates[i], *options_of[i]);
    params[i].tensor.sub_(updates[i].tensor, options_of[i]->lr() * ratio);
  }
  return loss;
}

}  // namespace smp::optim
