// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

namespace smp::detail {

/// False, where only a use of a template is a mistake.
template <class...>
inline constexpr bool never = false;

/// The members that `->` of a `Model` would reach: none compiles, and each tells the code to write
/// instead.
template <class Model>
class ByArrow {
 public:
#define SMP_BY_ARROW(name)                                                                  \
  template <class... Arguments>                                                             \
  auto name(Arguments&&... arguments) const {                                               \
    static_assert(never<Arguments...>, "write model->" #name "(...), not model." #name      \
                                       "(...): but for calls, a DistributedModel is used "  \
                                       "through ->, as a holder of libtorch is");           \
    return (*static_cast<const Model*>(this))->name(std::forward<Arguments>(arguments)...); \
  }
  SMP_BY_ARROW(backward)
  SMP_BY_ARROW(parameters)
  SMP_BY_ARROW(named_parameters)
  SMP_BY_ARROW(buffers)
  SMP_BY_ARROW(local_parameters)
  SMP_BY_ARROW(train)
  SMP_BY_ARROW(eval)
  SMP_BY_ARROW(is_training)
  SMP_BY_ARROW(zero_grad)
  SMP_BY_ARROW(state_dict)
  SMP_BY_ARROW(load_state_dict)
  SMP_BY_ARROW(to)
  SMP_BY_ARROW(cpu)
#undef SMP_BY_ARROW
};

}  // namespace smp::detail
