// SPDX-License-Identifier: Apache-2.0
#include "smp/optim/traits.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "core/check.h"
#include "optim/state_dict.h"
#include "smp/detail/optimizer_traits.h"
#include "smp/optim/adadelta.h"
#include "smp/optim/fused.h"
#include "smp/optim/lamb.h"
#include "smp/optim/novograd.h"

namespace smp::optim::detail {
namespace {

namespace to = torch::optim;

template <class... Optimizers>
std::optional<bool> find_among(const to::Optimizer& optimizer) {
  std::optional<bool> found;
  ((typeid(optimizer) == typeid(Optimizers) ? void(found = IsElementwise<Optimizers>::value)
                                            : void()),
   ...);
  return found;
}

/// The factory of the first of `Optimizers` that `optimizer` is, or null.
template <class... Optimizers>
ParamStateFactory find_factory(const to::Optimizer& optimizer) {
  ParamStateFactory found = nullptr;
  const auto try_one = [&](auto* is_one, ParamStateFactory factory) {
    found = found == nullptr && is_one != nullptr ? factory : found;
  };
  (try_one(dynamic_cast<const Optimizers*>(&optimizer),
           make_param_state<typename ParamStateOf<Optimizers>::type>),
   ...);
  return found;
}

}  // namespace

std::optional<bool> find_elementwise(const to::Optimizer& optimizer) {
  return find_among<to::SGD, to::Adam, to::AdamW, to::Adagrad, to::RMSprop, Adadelta, FusedSGD,
                    FusedAdam, FusedAdamW, FusedAdagrad, Lamb, NovoGrad, to::LBFGS>(optimizer);
}

ParamStateFactory find_param_state_factory(const to::Optimizer& optimizer) {
  check_state_per_parameter(optimizer);
  const ParamStateFactory factory = find_factory<to::SGD, to::Adam, to::AdamW, to::Adagrad,
                                                 to::RMSprop, Adadelta, Lamb, NovoGrad>(optimizer);
  SMP_CHECK_WITH(UsageError, factory != nullptr, "cannot restore the state of optimizer ",
                 c10::demangle(typeid(optimizer).name()),
                 ": the type of its per-parameter state is unknown. Specialise "
                 "smp::optim::ParamStateOf for it, see smp/optim/traits.h.");
  return factory;
}

}  // namespace smp::optim::detail
