// SPDX-License-Identifier: Apache-2.0
#include "optim/elementwise.h"

#include <c10/util/Type.h>

#include <string>

#include "core/check.h"

namespace smp::optim {

void check_elementwise(const detail::Traits& traits, const char* key, const char* usual) {
  const std::string name = c10::demangle(traits.type->name());
  SMP_CHECK_WITH(
      UsageError, traits.is_elementwise.has_value(), "\"", key,
      "\" needs an optimizer that updates each element of a parameter by itself, and of ", name,
      " it is not known whether it does. If so, say it: template <> struct "
      "smp::optim::IsElementwise<",
      name, "> : std::true_type {}; (smp/optim/traits.h). If not, set \"", key, "\" to ", usual);
  SMP_CHECK_WITH(UsageError, *traits.is_elementwise, "optimizer ", name,
                 " needs whole parameters, and with \"", key,
                 "\" each rank updates its pieces of them. Use another optimizer, or set \"", key,
                 "\" to ", usual);
}

void check_of_ranges(const detail::Traits& traits, const char* key, const char* usual) {
  check_elementwise(traits, key, usual);
  for (const auto& [field, layout] : traits.fields) {
    SMP_CHECK_WITH(UsageError, layout.kind != FieldLayout::Kind::kAlong, "optimizer ",
                   c10::demangle(traits.type->name()), " keeps \"", field,
                   "\" along dimensions of a parameter, and with \"", key,
                   "\" each rank updates ranges of its elements, which have no dimensions. Use "
                   "another optimizer, or set \"",
                   key, "\" to ", usual);
  }
}

}  // namespace smp::optim
