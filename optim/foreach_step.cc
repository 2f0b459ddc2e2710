// SPDX-License-Identifier: Apache-2.0
#include "optim/foreach_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <typeindex>
#include <utility>
#include <vector>

#include "core/tensor_lists.h"
#include "optim/list_program.h"

// Each rule below is the formula of a class of libtorch's (torch/csrc/api/src/optim), operator by
// operator in its order, so that each element is rounded where libtorch rounds it.
namespace smp::optim {
namespace {

using Tensors = std::vector<at::Tensor>;
using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// Parameters that are updated together, with their gradients and states.
template <class State>
struct Batch {
  Tensors params, grads;
  std::vector<State*> states;  // null where a rule makes it of the first gradient

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

/// The operations that update a batch.
template <class State>
class Update : public ListProgram {
 public:
  explicit Update(const Batch<State>& batch) : Update(batch, batch.params) {}
  Update(const Batch<State>& batch, const Tensors& of_params)
      : params(take(of_params)), grads(take(batch.grads)), batch_(batch) {}

  /// Lets the decay of the parameters add to the gradients.
  void decay(double weight_decay) {
    if (weight_decay != 0) grads = add(grads, params, weight_decay);
  }
  template <class Field>
  List take_states(const Field& field) {
    return take(batch_.of_states(field));
  }

  const List params;
  List grads;

 private:
  const Batch<State>& batch_;
};

struct SgdRule {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;

  static bool fits(const State* state, const Options& options) {
    return options.momentum() == 0 || state == nullptr || state->momentum_buffer().defined();
  }
  /// The momentum begins with the first gradient.
  static std::unique_ptr<State> make(const at::Tensor&, const Options&) { return nullptr; }
  static int64_t kind(const State* state) { return state == nullptr ? 0 : 1; }

  static void update(const Batch<State>& batch, const Options& options, States& states) {
    Tensors params;  // tensors whose versions stay, as in libtorch
    for (const at::Tensor& param : batch.params) params.push_back(param.data());
    Update<State> update(batch, params);
    update.decay(options.weight_decay());
    const bool has_momentum = options.momentum() != 0;
    const bool begins = has_momentum && batch.states.front() == nullptr;
    auto direction = update.grads;
    if (has_momentum) {
      direction = begins ? update.copy(update.grads) : momenta(update, options);
    }
    const auto buffers = direction;
    if (has_momentum && options.nesterov()) {
      direction = update.add(update.grads, buffers, options.momentum());
    }
    update.add_(update.params, direction, -1 * options.lr());
    update.run();
    if (begins) set_buffers(batch.params, update.tensors(buffers), states);
  }

  static ListProgram::List momenta(Update<State>& update, const Options& options) {
    const auto buffers =
        update.take_states([](const State& state) { return state.momentum_buffer(); });
    update.mul_(buffers, options.momentum());
    update.add_(buffers, update.grads, 1 - options.dampening());
    return buffers;
  }

  static void set_buffers(const Tensors& params, const Tensors& buffers, States& states) {
    for (size_t i = 0; i < params.size(); ++i) {
      auto state = std::make_unique<State>();
      state->momentum_buffer(buffers.at(i));
      states[params[i].unsafeGetTensorImpl()] = std::move(state);
    }
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

  static void update(const Batch<State>& batch, const Options& options, States&) {
    const auto [beta1, beta2] = options.betas();
    const int64_t step = batch.count_step();
    const double correction1 = 1 - std::pow(beta1, step);
    const double correction2 = 1 - std::pow(beta2, step);
    Update<State> update(batch);
    if (!kDecaysParameters) {
      update.decay(options.weight_decay());
    } else if (options.weight_decay() != 0) {
      update.mul_(update.params, 1 - options.lr() * options.weight_decay());
    }
    const auto exp_avgs = update.take_states([](const State& state) { return state.exp_avg(); });
    const auto exp_avg_sqs =
        update.take_states([](const State& state) { return state.exp_avg_sq(); });
    update.mul_(exp_avgs, beta1);
    update.add_(exp_avgs, update.grads, 1 - beta1);
    update.mul_(exp_avg_sqs, beta2);
    update.addcmul_(exp_avg_sqs, update.grads, update.grads, 1 - beta2);
    auto squares = exp_avg_sqs;
    if (options.amsgrad()) {
      squares = update.take_states([](const State& state) { return state.max_exp_avg_sq(); });
      update.maximum_(squares, exp_avg_sqs);
    }
    const auto denominators = update.sqrt(squares);
    update.div_(denominators, std::sqrt(correction2));
    update.add_(denominators, options.eps());
    update.addcdiv_(update.params, exp_avgs, denominators, -(options.lr() / correction1));
    update.run();
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
    Update<State> update(batch);
    update.decay(options.weight_decay());
    const auto sums = update.take_states([](const State& state) { return state.sum(); });
    update.addcmul_(sums, update.grads, update.grads, 1.0);
    const auto denominators = update.sqrt(sums);
    update.add_(denominators, options.eps());
    update.addcdiv_(update.params, update.grads, denominators, -lr);
    update.run();
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

  static ListProgram::List denominators(Update<State>& update, const Options& options) {
    const double alpha = options.alpha();
    const auto squares = update.take_states([](const State& state) { return state.square_avg(); });
    update.mul_(squares, alpha);
    update.addcmul_(squares, update.grads, update.grads, 1 - alpha);
    if (!options.centered()) return update.sqrt(squares);
    const auto averages = update.take_states([](const State& state) { return state.grad_avg(); });
    update.mul_(averages, alpha);
    update.add_(averages, update.grads, 1 - alpha);
    const auto variances = update.addcmul(squares, averages, averages, -1);
    update.sqrt_(variances);
    return variances;
  }

  static void update(const Batch<State>& batch, const Options& options, States&) {
    batch.count_step();
    Update<State> update(batch);
    update.decay(options.weight_decay());
    const auto denominators = RmspropRule::denominators(update, options);
    update.add_(denominators, options.eps());
    if (options.momentum() > 0) {
      const auto buffers =
          update.take_states([](const State& state) { return state.momentum_buffer(); });
      update.mul_(buffers, options.momentum());
      update.addcdiv_(buffers, update.grads, denominators, 1);
      update.add_(update.params, buffers, -options.lr());
    } else {
      update.addcdiv_(update.params, update.grads, denominators, -options.lr());
    }
    update.run();
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
  return all && !params.empty() && core::lie_apart(params);
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

template <class Rule>
void update(torch::optim::OptimizerParamGroup& group, States& states, const IsAbsent& is_absent) {
  using State = typename Rule::State;
  const auto& options = static_cast<const typename Rule::Options&>(group.options());
  std::map<Key, Batch<State>> batches;
  for (const at::Tensor& param : group.params()) {
    if (!param.grad().defined() || is_absent(param)) continue;
    State* state = find_state<State>(states, param);
    if (state == nullptr) {
      auto made = Rule::make(param, options);
      state = made.get();
      if (made) states[param.unsafeGetTensorImpl()] = std::move(made);
    }
    Batch<State>& batch = batches[key_of(param, Rule::kind(state))];
    batch.params.push_back(param);
    batch.grads.push_back(param.grad());
    batch.states.push_back(state);
  }
  for (const auto& [key, batch] : batches) Rule::update(batch, options, states);
}

template <class Rule>
bool step(torch::optim::Optimizer& optimizer, const IsAbsent& is_absent) {
  if (!fits<Rule>(optimizer, is_absent)) return false;
  for (auto& group : optimizer.param_groups()) update<Rule>(group, optimizer.state(), is_absent);
  return true;
}

using Step = bool (*)(torch::optim::Optimizer&, const IsAbsent&);

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
                  const IsAbsent& is_absent) {
  const auto found = steps().find(type);
  if (found == steps().end()) return false;
  const at::NoGradGuard no_grad;
  return found->second(optimizer, is_absent);
}

}  // namespace smp::optim
