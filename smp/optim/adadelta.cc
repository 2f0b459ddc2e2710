// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/adadelta.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/utils.h>

#include "optim/step_parts.h"

namespace smp::optim {
namespace {

void update(torch::Tensor param, const AdadeltaOptions& options, AdadeltaParamState& state) {
  torch::Tensor grad = param.grad();
  if (options.weight_decay() != 0) {
    grad = grad.add(param, options.weight_decay());
  }
  const double rho = options.rho();
  state.step(state.step() + 1);
  state.square_avg().mul_(rho).addcmul_(grad, grad, 1 - rho);
  const torch::Tensor root = state.square_avg().add(options.eps()).sqrt_();
  const torch::Tensor delta = state.acc_delta().add(options.eps()).sqrt_().div_(root).mul_(grad);
  state.acc_delta().mul_(rho).addcmul_(delta, delta, 1 - rho);
  param.add_(delta, -options.lr());
}

}  // namespace

void AdadeltaOptions::check() const {
  const auto expect = [](bool ok, const char* name, const char* range, double value) {
    detail::check_option(ok, "Adadelta", name, range, value);
  };
  expect(lr() >= 0, "lr", "at least 0", lr());
  expect(rho() >= 0 && rho() <= 1, "rho", "0 to 1", rho());
  expect(eps() >= 0, "eps", "at least 0", eps());
  expect(weight_decay() >= 0, "weight_decay", "at least 0", weight_decay());
}

AdadeltaParamState::AdadeltaParamState(const torch::Tensor& param)
    : square_avg_(at::zeros_like(param, at::MemoryFormat::Preserve)),
      acc_delta_(at::zeros_like(param, at::MemoryFormat::Preserve)) {}

torch::Tensor Adadelta::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss = detail::loss_of(closure);
  detail::for_each_gradient<AdadeltaOptions>(
      param_groups_, "Adadelta", [this](const torch::Tensor& param, const auto& options) {
        update(param, options, state_of(param));
      });
  return loss;
}

}  // namespace smp::optim
