// SPDX-License-Identifier: Apache-2.0
#include "optim/elementwise.h"

#include <c10/util/Type.h>

#include <string>

#include "core/check.h"

namespace smp::optim {

void check_elementwise(const detail::Elementwise& elementwise, const char* key, const char* usual) {
  const std::string name = c10::demangle(elementwise.type->name());
  SMP_CHECK_WITH(
      UsageError, elementwise.answer.has_value(), "\"", key,
      "\" needs an optimizer that updates each element of a parameter by itself, and of ", name,
      " it is not known whether it does. If so, say it: template <> struct "
      "smp::optim::IsElementwise<",
      name, "> : std::true_type {}; (smp/optim/traits.h). If not, set \"", key, "\" to ", usual);
  SMP_CHECK_WITH(UsageError, *elementwise.answer, "optimizer ", name,
                 " needs whole parameters, and with \"", key,
                 "\" each rank updates its pieces of them. Use another optimizer, or set \"", key,
                 "\" to ", usual);
}

}  // namespace smp::optim
