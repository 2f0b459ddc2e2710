// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/novograd.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "optim/grad_norm.h"
#include "optim/step_parts.h"

namespace smp::optim {
namespace {

void update_norm(double norm, const NovoGradOptions& options, NovoGradParamState& state) {
  const bool is_l2 = options.norm_type() == 2;
  const double beta2 = std::get<1>(options.betas()), old = state.grad_norm();
  if (state.step() == 1 && !options.init_zero()) {
    state.grad_norm(norm);
  } else if (is_l2) {
    state.grad_norm(std::sqrt(beta2 * old * old + (1 - beta2) * norm * norm));
  } else {
    state.grad_norm(beta2 * old + (1 - beta2) * norm);
  }
}

/// Updates with the norm of the parameter's gradient.
void update(torch::Tensor param, double norm, const NovoGradOptions& options,
            NovoGradParamState& state) {
  const auto [beta1, beta2] = options.betas();
  state.step(state.step() + 1);
  update_norm(norm, options, state);
  const auto steps = static_cast<double>(state.step());
  const double correction1 = options.bias_correction() ? 1 - std::pow(beta1, steps) : 1;
  const double correction2 = options.bias_correction() ? std::sqrt(1 - std::pow(beta2, steps)) : 1;
  const double divisor = state.grad_norm() / correction2 + options.eps();
  const auto regularize = [&](const torch::Tensor& direction) {
    torch::Tensor result = direction.div(divisor);
    return options.weight_decay() == 0 ? result : result.add_(param, options.weight_decay());
  };
  const bool inside = options.reg_inside_moment();
  const torch::Tensor grad = inside ? regularize(param.grad()) : param.grad();
  state.exp_avg().mul_(beta1).add_(grad, options.grad_averaging() ? 1 - beta1 : 1);
  const torch::Tensor average = state.exp_avg().div(correction1);
  param.sub_(inside ? average : regularize(average), options.lr());
}

}  // namespace

void NovoGradOptions::check() const {
  detail::check_adam_options("NovoGrad", *this);
  detail::check_option(norm_type() == 2 || norm_type() == 0, "NovoGrad", "norm_type", "2 or 0",
                       static_cast<double>(norm_type()));
}

NovoGradParamState::NovoGradParamState(const torch::Tensor& param)
    : exp_avg_(at::zeros_like(param, at::MemoryFormat::Preserve)) {}

/// Norms of all gradients that exist, each of the order that its group has.
std::vector<double> NovoGrad::norms_of_gradients() {
  std::vector<TensorOfParameter> gradients;
  std::vector<int64_t> types;
  detail::for_each_gradient<NovoGradOptions>(param_groups_, "NovoGrad",
                                             [&](const torch::Tensor& param, const auto& options) {
                                               gradients.push_back({param, param.grad()});
                                               types.push_back(options.norm_type());
                                             });
  std::vector<double> norms(gradients.size());
  for (const int64_t type : {2, 0}) {
    // Groups are the same on all ranks, parameters that they have there are not.
    const bool is_used =
        std::any_of(param_groups_.begin(), param_groups_.end(), [type](const auto& group) {
          return static_cast<const NovoGradOptions&>(group.options()).norm_type() == type;
        });
    if (!is_used) continue;
    const auto of_type =
        tensor_norms_(gradients, type == 2 ? 2.0 : std::numeric_limits<double>::infinity());
    for (size_t i = 0; i < types.size(); ++i) {
      if (types[i] == type) norms[i] = of_type[i];
    }
  }
  return norms;
}

torch::Tensor NovoGrad::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss = detail::loss_of(closure);
  const auto norms = norms_of_gradients();
  size_t next = 0;
  detail::for_each_gradient<NovoGradOptions>(
      param_groups_, "NovoGrad", [&](const torch::Tensor& param, const auto& options) {
        update(param, norms[next++], options, state_of(param));
      });
  return loss;
}

}  // namespace smp::optim
