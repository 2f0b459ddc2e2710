// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/jit_type.h>

// clang instantiates virtual members of templates at the end of each source that sees a class with
// them, also after a precompiled header: half a second for those here. A member that something
// calls is instantiated in the precompiled header (-fpch-instantiate-templates), so these functions
// call them. No source calls the functions, and no code is made of them.

namespace smp::precompiled {

template <typename Single>
void use_type(const Single& type) {
  (void)type.Single::equals(type);
  (void)type.Single::hasFreeVariables();
  (void)type.Single::containedTypes();
}

inline void use_types(const c10::AwaitType& await, const c10::FutureType& future,
                      const c10::ListType& list, const c10::RRefType& reference) {
  using Kind = c10::TypeKind;
  use_type<c10::SingleElementType<Kind::AwaitType, c10::AwaitType>>(await);
  use_type<c10::SingleElementType<Kind::FutureType, c10::FutureType>>(future);
  use_type<c10::SingleElementType<Kind::ListType, c10::ListType>>(list);
  use_type<c10::SingleElementType<Kind::RRefType, c10::RRefType>>(reference);
}

}  // namespace smp::precompiled
