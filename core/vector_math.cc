// SPDX-License-Identifier: Apache-2.0
#include "core/vector_math.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/sqrt.h>

namespace smp::core {

void prepare_vector_math() {
  static const bool prepared = at::sqrt(at::ones({1}, at::kFloat)).defined();
  static_cast<void>(prepared);
}

}  // namespace smp::core
