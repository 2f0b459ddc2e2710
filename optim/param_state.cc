#include "optim/param_state.h"

#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>

#include "core/check.h"

namespace smp::optim {
namespace {

/// The factory of the first of `Optimizers` that `optimizer` is, or null.
template <class... Optimizers>
ParamStateFactory find_factory(const torch::optim::Optimizer& optimizer) {
  ParamStateFactory found = nullptr;
  const auto try_one = [&](auto* is_one, ParamStateFactory factory) {
    found = found == nullptr && is_one != nullptr ? factory : found;
  };
  (try_one(dynamic_cast<const Optimizers*>(&optimizer),
           detail::make_param_state<typename ParamStateOf<Optimizers>::type>),
   ...);
  return found;
}

}  // namespace

void check_state_per_parameter(const torch::optim::Optimizer& optimizer) {
  SMP_CHECK_WITH(UsageError, dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
                 "cannot save or restore the state of torch::optim::LBFGS by parameter name: it "
                 "has one state for all parameters together. Use another optimizer.");
}

ParamStateFactory param_state_factory(const torch::optim::Optimizer& optimizer) {
  check_state_per_parameter(optimizer);
  namespace to = torch::optim;
  const ParamStateFactory factory = find_factory<to::SGD, to::Adam, to::AdamW, to::Adagrad,
                                                 to::RMSprop, Adadelta, Lamb, NovoGrad>(optimizer);
  SMP_CHECK_WITH(UsageError, factory != nullptr, "cannot restore the state of optimizer ",
                 c10::demangle(typeid(optimizer).name()),
                 ": the type of its per-parameter state is unknown. Specialise "
                 "smp::optim::ParamStateOf for it, see optim/param_state.h.");
  return factory;
}

}  // namespace smp::optim
