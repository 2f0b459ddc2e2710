// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/fused.h"

#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/utils.h>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "optim/step_parts.h"

namespace smp::optim {
namespace {

using torch::optim::OptimizerParamGroup;
using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// Tensors for one call of a kernel; those of a parameter have the same index.
struct Batch {
  std::vector<at::Tensor> params, grads, first, second, third, steps;
};

/// A call updates parameters of one type and device that have done equally many steps.
using Key = std::tuple<int64_t, at::ScalarType, at::DeviceType, at::DeviceIndex>;
using Batches = std::map<Key, Batch>;

Key key_of(const at::Tensor& param, int64_t step) {
  return {step, param.scalar_type(), param.device().type(), param.device().index()};
}

bool fits(const at::Tensor& param) {
  return at::isFloatingType(param.scalar_type()) && param.is_non_overlapping_and_dense() &&
         !param.grad().is_sparse();
}

/// Whether the kernels take all parameters that have a gradient.
bool fit(const std::vector<OptimizerParamGroup>& groups) {
  for (const auto& group : groups) {
    for (const at::Tensor& param : group.params()) {
      if (param.grad().defined() && !fits(param)) return false;
    }
  }
  return true;
}

/// The kernels go through memory without regard to strides.
at::Tensor laid_out_as(const at::Tensor& param, const at::Tensor& tensor) {
  if (tensor.strides() == param.strides()) return tensor;
  return at::empty_like(param, tensor.options(), at::MemoryFormat::Preserve).copy_(tensor);
}

at::Tensor zeros_for(const at::Tensor& param) {
  return at::zeros_like(param, at::MemoryFormat::Preserve);
}

/// Adds the arguments of all kernels; `step` counts the one that is done now.
Batch& add(Batches& batches, const at::Tensor& param, int64_t step) {
  Batch& batch = batches[key_of(param, step)];
  const auto options = param.options().dtype(at::kFloat);
  batch.params.push_back(param);
  batch.grads.push_back(laid_out_as(param, param.grad()));
  batch.steps.push_back(batch.steps.empty() ? at::full({}, static_cast<double>(step), options)
                                            : batch.steps.front());
  return batch;
}

template <class State>
State& state_of(States& states, const at::Tensor& param) {
  auto& state = states[param.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

/// Has `add_param` put the parameters of each group into batches, and calls `kernel` for each.
template <class Options, class AddParam, class Kernel>
void for_each_batch(std::vector<OptimizerParamGroup>& groups, const AddParam& add_param,
                    const Kernel& kernel) {
  for (auto& group : groups) {
    const auto& options = static_cast<const Options&>(group.options());
    Batches batches;
    for (const at::Tensor& param : group.params()) {
      if (param.grad().defined()) add_param(batches, param, options);
    }
    for (auto& [key, batch] : batches) kernel(batch, options);
  }
}

/// Adam and AdamW, which have the same fields.
template <class State, class Options, class Kernel>
void step_adam(std::vector<OptimizerParamGroup>& groups, States& states, const Kernel& kernel) {
  const auto add_param = [&](Batches& batches, const at::Tensor& param, const Options& options) {
    auto& state = state_of<State>(states, param);
    if (!state.exp_avg().defined()) {
      state.exp_avg(zeros_for(param));
      state.exp_avg_sq(zeros_for(param));
    }
    if (options.amsgrad() && !state.max_exp_avg_sq().defined()) {
      state.max_exp_avg_sq(zeros_for(param));
    }
    state.step(state.step() + 1);
    Batch& batch = add(batches, param, state.step());
    batch.first.push_back(state.exp_avg());
    batch.second.push_back(state.exp_avg_sq());
    if (options.amsgrad()) batch.third.push_back(state.max_exp_avg_sq());
  };
  for_each_batch<Options>(groups, add_param, [&](Batch& batch, const Options& options) {
    const auto [beta1, beta2] = options.betas();
    kernel(batch.params, batch.grads, batch.first, batch.second, batch.third, batch.steps,
           options.lr(), beta1, beta2, options.weight_decay(), options.eps(), options.amsgrad(),
           /*maximize=*/false);
  });
}

}  // namespace

torch::Tensor FusedSGD::step(LossClosure closure) {
  using torch::optim::SGDOptions;
  const torch::NoGradGuard no_grad;
  torch::Tensor loss = detail::loss_of(closure);
  if (!fit(param_groups_)) {
    SGD::step();
    return loss;
  }
  // Parameters that have no momentum yet go apart: it becomes the gradient.
  constexpr int64_t kFirst = 1, kLater = 2;
  const auto add_param = [&](Batches& batches, const at::Tensor& param, const SGDOptions& options) {
    if (options.momentum() == 0) {
      add(batches, param, kLater);
      return;
    }
    auto& state = state_of<torch::optim::SGDParamState>(state_, param);
    const bool is_first = !state.momentum_buffer().defined();
    if (is_first) state.momentum_buffer(zeros_for(param));
    add(batches, param, is_first ? kFirst : kLater).first.push_back(state.momentum_buffer());
  };
  for_each_batch<SGDOptions>(param_groups_, add_param, [](Batch& batch, const SGDOptions& options) {
    const bool is_first = batch.steps[0].item<double>() == kFirst;
    at::_fused_sgd_(batch.params, batch.grads, batch.first, options.weight_decay(),
                    options.momentum(), options.lr(), options.dampening(), options.nesterov(),
                    /*maximize=*/false, is_first);
  });
  return loss;
}

torch::Tensor FusedAdam::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss = detail::loss_of(closure);
  if (!fit(param_groups_)) {
    Adam::step();
    return loss;
  }
  step_adam<torch::optim::AdamParamState, torch::optim::AdamOptions>(
      param_groups_, state_, [](const auto&... arguments) { at::_fused_adam_(arguments...); });
  return loss;
}

torch::Tensor FusedAdamW::step(LossClosure closure) {
  const torch::NoGradGuard no_grad;
  torch::Tensor loss = detail::loss_of(closure);
  if (!fit(param_groups_)) {
    AdamW::step();
    return loss;
  }
  step_adam<torch::optim::AdamWParamState, torch::optim::AdamWOptions>(
      param_groups_, state_, [](const auto&... arguments) { at::_fused_adamw_(arguments...); });
  return loss;
}

torch::Tensor FusedAdagrad::step(LossClosure closure) {
  using torch::optim::AdagradOptions;
  const torch::NoGradGuard no_grad;
  torch::Tensor loss = detail::loss_of(closure);
  if (!fit(param_groups_)) {
    Adagrad::step();
    return loss;
  }
  const auto add_param = [&](Batches& batches, const at::Tensor& param,
                             const AdagradOptions& options) {
    auto& state = state_of<torch::optim::AdagradParamState>(state_, param);
    if (!state.sum().defined()) {
      state.sum(
          at::full_like(param, options.initial_accumulator_value(), at::MemoryFormat::Preserve));
    }
    state.step(state.step() + 1);
    add(batches, param, state.step()).first.push_back(state.sum());
  };
  for_each_batch<AdagradOptions>(
      param_groups_, add_param, [](Batch& batch, const AdagradOptions& options) {
        at::_fused_adagrad_(batch.params, batch.grads, batch.first, batch.steps, options.lr(),
                            options.lr_decay(), options.weight_decay(), options.eps(),
                            /*maximize=*/false);
      });
  return loss;
}

}  // namespace smp::optim
