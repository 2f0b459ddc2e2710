// SPDX-License-Identifier: Apache-2.0
#include "optim/foreach_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <typeindex>
#include <utility>
#include <vector>

#include "core/tensor_lists.h"

// Each rule below is the formula of a class of libtorch's (torch/csrc/api/src/optim), operator by
// operator in its order, so that each element is rounded where libtorch rounds it.
namespace smp::optim {
namespace {

using Tensors = std::vector<at::Tensor>;
using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// Elements of a batch, if it has several parameters. One kernel takes no more (320 blocks of
/// 65,536 elements each), so that larger batches would have as many, and take more memory for what
/// is computed on the way.
constexpr int64_t kMostElements = 320 * 65536;

/// Parameters that are updated together, with their gradients and states.
template <class State>
struct Batch {
  Tensors params, grads;
  std::vector<State*> states;  // null where a rule makes it of the first gradient
  int64_t numel = 0;
  bool fast = false;  // whether it may be rounded otherwise than by libtorch's class

  /// A tensor of each state.
  template <class Field>
  Tensors of_states(const Field& field) const {
    Tensors tensors;
    for (State* state : states) tensors.push_back(field(*state));
    return tensors;
  }

  /// The number of the step that begins, which is the same for all.
  int64_t count_step() const {
    const int64_t step = states.front()->step() + 1;
    for (State* state : states) state->step(step);
    return step;
  }
};

at::Tensor zeros_for(const at::Tensor& param) {
  return at::zeros_like(param, at::MemoryFormat::Preserve);
}

/// Gradients with the decay of the parameters.
template <class State>
Tensors decayed(const Batch<State>& batch, double weight_decay) {
  if (weight_decay == 0) return batch.grads;
  return at::_foreach_add(batch.grads, batch.params, weight_decay);
}

struct SgdRule {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;

  static bool fits(const State* state, const Options& options) {
    return options.momentum() == 0 || state == nullptr || state->momentum_buffer().defined();
  }
  /// The momentum begins with the first gradient.
  static std::unique_ptr<State> make(const at::Tensor&, const Options&) { return nullptr; }
  static int64_t kind(const State* state) { return state == nullptr ? 0 : 1; }

  static Tensors momenta(const Batch<State>& batch, const Tensors& grads, const Options& options,
                         States& states) {
    Tensors buffers;
    if (batch.states.front() == nullptr) {
      for (size_t i = 0; i < grads.size(); ++i) {
        buffers.push_back(at::clone(grads[i]).detach());
        auto state = std::make_unique<State>();
        state->momentum_buffer(buffers.back());
        states[batch.params[i].unsafeGetTensorImpl()] = std::move(state);
      }
      return buffers;
    }
    buffers = batch.of_states([](const State& state) { return state.momentum_buffer(); });
    at::_foreach_mul_(buffers, options.momentum());
    at::_foreach_add_(buffers, grads, 1 - options.dampening());
    return buffers;
  }

  static void update(const Batch<State>& batch, const Options& options, States& states) {
    Tensors grads = decayed(batch, options.weight_decay());
    if (options.momentum() != 0) {
      const Tensors buffers = momenta(batch, grads, options, states);
      grads = options.nesterov() ? at::_foreach_add(grads, buffers, options.momentum()) : buffers;
    }
    Tensors params;  // whose versions stay, as in libtorch
    for (const at::Tensor& param : batch.params) params.push_back(param.data());
    at::_foreach_add_(params, grads, -1 * options.lr());
  }
};

/// Adam, and AdamW, which decays parameters instead of adding to gradients.
template <class OptionsType, class StateType, bool kDecaysParameters>
struct AdamRule {
  using Options = OptionsType;
  using State = StateType;

  static bool fits(const State* state, const Options& options) {
    return state == nullptr || (state->exp_avg().defined() && state->exp_avg_sq().defined() &&
                                (!options.amsgrad() || state->max_exp_avg_sq().defined()));
  }
  static std::unique_ptr<State> make(const at::Tensor& param, const Options& options) {
    auto state = std::make_unique<State>();
    state->exp_avg(zeros_for(param));
    state->exp_avg_sq(zeros_for(param));
    if (options.amsgrad()) state->max_exp_avg_sq(zeros_for(param));
    return state;
  }
  static int64_t kind(const State* state) { return state->step(); }

  /// The lists of the fused kernels, which take only what is of one dtype and lies alike.
  static bool fit_fused(const std::vector<Tensors>& lists) {
    for (const Tensors& list : lists) {
      for (size_t i = 0; i < list.size(); ++i) {
        const at::Tensor& param = lists.front()[i];
        if (list[i].scalar_type() != param.scalar_type() || !core::lie_alike(list[i], param)) {
          return false;
        }
      }
    }
    return true;
  }

  /// All of it in one kernel, which rounds less. Returns whether that was possible.
  static bool update_fused(const Batch<State>& batch, const Options& options) {
    const auto [beta1, beta2] = options.betas();
    Tensors grads, largest;
    for (const at::Tensor& grad : batch.grads) grads.push_back(grad.data());  // versions stay
    const Tensors exp_avgs = batch.of_states([](const State& state) { return state.exp_avg(); });
    const Tensors exp_avg_sqs =
        batch.of_states([](const State& state) { return state.exp_avg_sq(); });
    if (options.amsgrad()) {
      largest = batch.of_states([](const State& state) { return state.max_exp_avg_sq(); });
    }
    if (!fit_fused({batch.params, grads, exp_avgs, exp_avg_sqs, largest})) return false;
    const auto step = static_cast<double>(batch.states.front()->step() + 1);
    const Tensors steps(batch.params.size(),
                        at::full({}, step, batch.params.front().options().dtype(at::kFloat)));
    const auto fused =
        kDecaysParameters ? &at::_ops::_fused_adamw_::call : &at::_ops::_fused_adam_::call;
    fused(batch.params, grads, exp_avgs, exp_avg_sqs, largest, steps, options.lr(), beta1, beta2,
          options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false,
          /*grad_scale=*/{}, /*found_inf=*/{});
    batch.count_step();
    return true;
  }

  static void update(const Batch<State>& batch, const Options& options, States&) {
    if (batch.fast && update_fused(batch, options)) return;
    const auto [beta1, beta2] = options.betas();
    const int64_t step = batch.count_step();
    const double correction1 = 1 - std::pow(beta1, step);
    const double correction2 = 1 - std::pow(beta2, step);
    if (kDecaysParameters && options.weight_decay() != 0) {
      at::_foreach_mul_(batch.params, 1 - options.lr() * options.weight_decay());
    }
    const Tensors grads = decayed(batch, kDecaysParameters ? 0 : options.weight_decay());
    const Tensors exp_avgs = batch.of_states([](const State& state) { return state.exp_avg(); });
    const Tensors exp_avg_sqs =
        batch.of_states([](const State& state) { return state.exp_avg_sq(); });
    at::_foreach_mul_(exp_avgs, beta1);
    at::_foreach_add_(exp_avgs, grads, 1 - beta1);
    at::_foreach_mul_(exp_avg_sqs, beta2);
    at::_foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2);
    Tensors denominators;
    if (options.amsgrad()) {
      const Tensors largest =
          batch.of_states([](const State& state) { return state.max_exp_avg_sq(); });
      at::_foreach_maximum_(largest, exp_avg_sqs);
      denominators = at::_foreach_sqrt(largest);
    } else {
      denominators = at::_foreach_sqrt(exp_avg_sqs);
    }
    at::_foreach_div_(denominators, std::sqrt(correction2));
    at::_foreach_add_(denominators, options.eps());
    at::_foreach_addcdiv_(batch.params, exp_avgs, denominators, -(options.lr() / correction1));
  }
};

struct AdagradRule {
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;

  /// The class makes states in its constructor.
  static bool fits(const State* state, const Options&) {
    return state != nullptr && state->sum().defined();
  }
  static std::unique_ptr<State> make(const at::Tensor&, const Options&) { return nullptr; }
  static int64_t kind(const State* state) { return state->step(); }

  static void update(const Batch<State>& batch, const Options& options, States&) {
    const int64_t step = batch.count_step();
    const double lr = options.lr() / (1 + static_cast<double>(step - 1) * options.lr_decay());
    const Tensors grads = decayed(batch, options.weight_decay());
    const Tensors sums = batch.of_states([](const State& state) { return state.sum(); });
    at::_foreach_addcmul_(sums, grads, grads, 1.0);
    const Tensors denominators = at::_foreach_sqrt(sums);
    at::_foreach_add_(denominators, options.eps());
    at::_foreach_addcdiv_(batch.params, grads, denominators, -lr);
  }
};

struct RmspropRule {
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;

  static bool fits(const State* state, const Options& options) {
    return state == nullptr || (state->square_avg().defined() &&
                                (options.momentum() <= 0 || state->momentum_buffer().defined()) &&
                                (!options.centered() || state->grad_avg().defined()));
  }
  static std::unique_ptr<State> make(const at::Tensor& param, const Options& options) {
    auto state = std::make_unique<State>();
    state->square_avg(zeros_for(param));
    if (options.momentum() > 0) state->momentum_buffer(zeros_for(param));
    if (options.centered()) state->grad_avg(zeros_for(param));
    return state;
  }
  static int64_t kind(const State* state) { return state->step(); }

  static Tensors denominators(const Batch<State>& batch, const Tensors& grads,
                              const Options& options) {
    const double alpha = options.alpha();
    const Tensors squares = batch.of_states([](const State& state) { return state.square_avg(); });
    at::_foreach_mul_(squares, alpha);
    at::_foreach_addcmul_(squares, grads, grads, 1 - alpha);
    Tensors result;
    if (options.centered()) {
      const Tensors averages = batch.of_states([](const State& state) { return state.grad_avg(); });
      at::_foreach_mul_(averages, alpha);
      at::_foreach_add_(averages, grads, 1 - alpha);
      result = at::_foreach_addcmul(squares, averages, averages, -1);
      at::_foreach_sqrt_(result);
    } else {
      result = at::_foreach_sqrt(squares);
    }
    at::_foreach_add_(result, options.eps());
    return result;
  }

  static void update(const Batch<State>& batch, const Options& options, States&) {
    batch.count_step();
    const Tensors grads = decayed(batch, options.weight_decay());
    const Tensors denominators = RmspropRule::denominators(batch, grads, options);
    if (options.momentum() > 0) {
      const Tensors buffers =
          batch.of_states([](const State& state) { return state.momentum_buffer(); });
      at::_foreach_mul_(buffers, options.momentum());
      at::_foreach_addcdiv_(buffers, grads, denominators);
      at::_foreach_add_(batch.params, buffers, -options.lr());
    } else {
      at::_foreach_addcdiv_(batch.params, grads, denominators, -options.lr());
    }
  }
};

/// Parameters to update: of this rank, with a gradient.
template <class Visit>
void for_each_updated(torch::optim::Optimizer& optimizer, const IsAbsent& is_absent,
                      const Visit& visit) {
  for (auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (param.grad().defined() && !is_absent(param)) visit(param, group.options());
    }
  }
}

template <class State>
State* find_state(States& states, const at::Tensor& param) {
  const auto found = states.find(param.unsafeGetTensorImpl());
  return found == states.end() ? nullptr : static_cast<State*>(found->second.get());
}

bool is_apart(const Tensors& params) {
  std::vector<std::pair<const char*, const char*>> ranges;
  for (const at::Tensor& param : params) {
    if (param.numel() == 0) continue;
    int64_t last = 0;
    for (int64_t i = 0; i < param.dim(); ++i) last += (param.size(i) - 1) * param.stride(i);
    const auto* begin = static_cast<const char*>(param.const_data_ptr());
    ranges.emplace_back(begin, begin + (last + 1) * static_cast<int64_t>(param.itemsize()));
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) return false;
  }
  return true;
}

/// Whether the rule can update all parameters that have a gradient, and there is one.
template <class Rule>
bool fits(torch::optim::Optimizer& optimizer, const IsAbsent& is_absent) {
  bool all = true;
  Tensors params;
  for_each_updated(optimizer, is_absent, [&](const at::Tensor& param, auto& options) {
    const at::Tensor& grad = param.grad();
    const auto* state = find_state<typename Rule::State>(optimizer.state(), param);
    all = all && core::fits_lists(param) && core::fits_lists(grad) && !is_absent(grad) &&
          grad.device() == param.device() &&
          Rule::fits(state, static_cast<const typename Rule::Options&>(options));
    params.push_back(param);
  });
  return all && !params.empty() && is_apart(params);
}

/// The parameters of a batch have these in common, beside their group: the rule's kind, device and
/// dtype, and whether they lie as their gradients, so that one that does not leaves the others one
/// kernel.
using Key = std::tuple<int64_t, c10::DeviceType, c10::DeviceIndex, at::ScalarType, bool>;

Key key_of(const at::Tensor& param, int64_t kind) {
  const at::Tensor& grad = param.grad();
  const bool alike = param.scalar_type() == grad.scalar_type() && core::lie_alike(param, grad);
  return {kind, param.device().type(), param.device().index(), param.scalar_type(), alike};
}

template <class State>
void add(std::vector<Batch<State>>& batches, const at::Tensor& param, State* state) {
  const bool is_full = batches.empty() || batches.back().numel + param.numel() > kMostElements;
  Batch<State>& batch = is_full ? batches.emplace_back() : batches.back();
  batch.params.push_back(param);
  batch.grads.push_back(param.grad());
  batch.states.push_back(state);
  batch.numel += param.numel();
}

template <class Rule>
void update(torch::optim::OptimizerParamGroup& group, States& states, const IsAbsent& is_absent,
            bool fast) {
  using State = typename Rule::State;
  const auto& options = static_cast<const typename Rule::Options&>(group.options());
  std::map<Key, std::vector<Batch<State>>> batches;
  for (const at::Tensor& param : group.params()) {
    if (!param.grad().defined() || is_absent(param)) continue;
    State* state = find_state<State>(states, param);
    if (state == nullptr) {
      auto made = Rule::make(param, options);
      state = made.get();
      if (made) states[param.unsafeGetTensorImpl()] = std::move(made);
    }
    add(batches[key_of(param, Rule::kind(state))], param, state);
  }
  for (auto& [key, alike] : batches) {
    for (Batch<State>& batch : alike) {
      batch.fast = fast;
      Rule::update(batch, options, states);
    }
  }
}

template <class Rule>
bool step(torch::optim::Optimizer& optimizer, const IsAbsent& is_absent, bool fast) {
  if (!fits<Rule>(optimizer, is_absent)) return false;
  for (auto& group : optimizer.param_groups()) {
    update<Rule>(group, optimizer.state(), is_absent, fast);
  }
  return true;
}

using Step = bool (*)(torch::optim::Optimizer&, const IsAbsent&, bool fast);

const std::map<std::type_index, Step>& steps() {
  using namespace torch::optim;
  static const std::map<std::type_index, Step> steps = {
      {typeid(SGD), step<SgdRule>},
      {typeid(Adam), step<AdamRule<AdamOptions, AdamParamState, false>>},
      {typeid(AdamW), step<AdamRule<AdamWOptions, AdamWParamState, true>>},
      {typeid(Adagrad), step<AdagradRule>},
      {typeid(RMSprop), step<RmspropRule>},
  };
  return steps;
}

}  // namespace

bool foreach_step(torch::optim::Optimizer& optimizer, const std::type_info& type,
                  const IsAbsent& is_absent, bool fast) {
  const auto found = steps().find(type);
  if (found == steps().end()) return false;
  const at::NoGradGuard no_grad;
  return found->second(optimizer, is_absent, fast);
}

}  // namespace smp::optim
