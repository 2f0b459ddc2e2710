// SPDX-License-Identifier: Apache-2.0
#include "smp/detail/optimizer_state_size.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "smp/optim/adadelta.h"
#include "smp/optim/lamb.h"
#include "smp/optim/novograd.h"

namespace smp::optim::detail {
namespace {

namespace to = torch::optim;

/// The group's options if `optimizer` is an `Optimizer`, else null.
template <class Optimizer, class Options>
const Options* options_of(const to::Optimizer& optimizer, const to::OptimizerParamGroup& group) {
  const bool is_one = dynamic_cast<const Optimizer*>(&optimizer) != nullptr && group.has_options();
  return is_one ? dynamic_cast<const Options*>(&group.options()) : nullptr;
}

}  // namespace

std::optional<int64_t> state_tensors(const to::Optimizer& optimizer,
                                     const to::OptimizerParamGroup& group) {
  if (const auto* sgd = options_of<to::SGD, to::SGDOptions>(optimizer, group)) {
    return sgd->momentum() != 0 ? 1 : 0;
  }
  if (const auto* adam = options_of<to::Adam, to::AdamOptions>(optimizer, group)) {
    return adam->amsgrad() ? 3 : 2;
  }
  if (const auto* adamw = options_of<to::AdamW, to::AdamWOptions>(optimizer, group)) {
    return adamw->amsgrad() ? 3 : 2;
  }
  if (options_of<to::Adagrad, to::AdagradOptions>(optimizer, group)) return 1;
  if (const auto* rmsprop = options_of<to::RMSprop, to::RMSpropOptions>(optimizer, group)) {
    return 1 + (rmsprop->momentum() > 0 ? 1 : 0) + (rmsprop->centered() ? 1 : 0);
  }
  if (const auto* lbfgs = options_of<to::LBFGS, to::LBFGSOptions>(optimizer, group)) {
    return 2 + 2 * lbfgs->history_size();  // direction, gradient; directions and steps before
  }
  if (options_of<Adadelta, AdadeltaOptions>(optimizer, group)) return 2;
  if (options_of<Lamb, LambOptions>(optimizer, group)) return 2;
  if (options_of<NovoGrad, NovoGradOptions>(optimizer, group)) return 1;
  return std::nullopt;
}

}  // namespace smp::optim::detail
