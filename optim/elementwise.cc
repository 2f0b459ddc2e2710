#include "optim/elementwise.h"

#include <c10/util/Type.h>

#include "core/check.h"

namespace smp::optim {
namespace {

template <class... Optimizers>
std::optional<bool> find_among(const torch::optim::Optimizer& optimizer) {
  std::optional<bool> found;
  ((typeid(optimizer) == typeid(Optimizers) ? void(found = IsElementwise<Optimizers>::value)
                                            : void()),
   ...);
  return found;
}

}  // namespace

std::optional<bool> find_elementwise(const torch::optim::Optimizer& optimizer) {
  namespace to = torch::optim;
  return find_among<to::SGD, to::Adam, to::AdamW, to::Adagrad, to::RMSprop, Adadelta, FusedSGD,
                    FusedAdam, FusedAdamW, FusedAdagrad, Lamb, NovoGrad, to::LBFGS>(optimizer);
}

void Elementwise::check(const char* key, const char* usual) const {
  const std::string name = c10::demangle(type->name());
  SMP_CHECK_WITH(UsageError, answer.has_value(),
                 "\"", key,
                 "\" needs an optimizer that updates each element of a parameter by itself, and of ",
                 name,
                 " it is not known whether it does. If so, say it: template <> struct "
                 "smp::optim::IsElementwise<",
                 name,
                 "> : std::true_type {}; (optim/elementwise.h). If not, set \"", key, "\" to ",
                 usual);
  SMP_CHECK_WITH(UsageError, *answer, "optimizer ", name, " needs whole parameters, and with "
                 "\"", key, "\" each rank updates its pieces of them. Use another optimizer, or "
                 "set \"", key, "\" to ", usual);
}

}  // namespace smp::optim
