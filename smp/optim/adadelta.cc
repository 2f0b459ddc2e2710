// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/adadelta.h"

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/utils.h>

#include <memory>

#include "optim/step_parts.h"

namespace smp::optim {
namespace {

void check_options(const AdadeltaOptions& options) {
  const auto check = [](bool ok, const char* name, const char* range, double value) {
    detail::check_option(ok, "Adadelta", name, range, value);
  };
  check(options.lr() >= 0, "lr", "at least 0", options.lr());
  check(options.rho() >= 0 && options.rho() <= 1, "rho", "0 to 1", options.rho());
  check(options.eps() >= 0, "eps", "at least 0", options.eps());
  check(options.weight_decay() >= 0, "weight_decay", "at least 0", options.weight_decay());
}

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

AdadeltaOptions::AdadeltaOptions(double lr) : lr_(lr) {}

bool operator==(const AdadeltaOptions& lhs, const AdadeltaOptions& rhs) {
  return lhs.lr() == rhs.lr() && lhs.rho() == rhs.rho() && lhs.eps() == rhs.eps() &&
         lhs.weight_decay() == rhs.weight_decay();
}

void AdadeltaOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(rho);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

void AdadeltaOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, rho);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

double AdadeltaOptions::get_lr() const { return lr(); }

void AdadeltaOptions::set_lr(const double lr) { this->lr(lr); }

bool operator==(const AdadeltaParamState& lhs, const AdadeltaParamState& rhs) {
  return lhs.step() == rhs.step() && detail::same_tensor(lhs.square_avg(), rhs.square_avg()) &&
         detail::same_tensor(lhs.acc_delta(), rhs.acc_delta());
}

void AdadeltaParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(square_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(acc_delta);
}

void AdadeltaParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, square_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, acc_delta);
}

Adadelta::Adadelta(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   AdadeltaOptions defaults)
    : OwnOptions(param_groups, std::make_unique<AdadeltaOptions>(defaults)) {
  check_options(defaults);
  for (const auto& group : param_groups_) {
    check_options(static_cast<const AdadeltaOptions&>(group.options()));
  }
}

Adadelta::Adadelta(std::vector<torch::Tensor> params, AdadeltaOptions defaults)
    : Adadelta({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

AdadeltaParamState& Adadelta::state_of(const torch::Tensor& param) {
  auto& state = state_[param.unsafeGetTensorImpl()];
  if (!state) {
    auto fresh = std::make_unique<AdadeltaParamState>();
    fresh->square_avg(at::zeros_like(param, at::MemoryFormat::Preserve));
    fresh->acc_delta(at::zeros_like(param, at::MemoryFormat::Preserve));
    state = std::move(fresh);
  }
  return static_cast<AdadeltaParamState&>(*state);
}

torch::Tensor Adadelta::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss = detail::loss_of(closure);
  detail::for_each_gradient<AdadeltaOptions>(
      param_groups_, "Adadelta", [this](const torch::Tensor& param, const auto& options) {
        update(param, options, state_of(param));
      });
  return loss;
}

void Adadelta::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdadeltaParamState, AdadeltaOptions>(archive, *this);
}

void Adadelta::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdadeltaParamState, AdadeltaOptions>(archive, *this);
}

}  // namespace smp::optim
