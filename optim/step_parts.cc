// SPDX-License-Identifier: Apache-2.0
#include "optim/step_parts.h"

#include <ATen/ops/equal.h>

namespace smp::optim::detail {

at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode enable_grad(true);
  return closure();
}

void check_dense(const char* optimizer, const at::Tensor& parameter) {
  SMP_CHECK_WITH(UsageError, !parameter.grad().is_sparse(), optimizer,
                 ": expected dense gradients, got a sparse one for a parameter of shape ",
                 parameter.sizes(), ". Build the embedding with sparse(false).");
}

void check_option(bool ok, const char* optimizer, const char* option, const char* range,
                  double value) {
  SMP_CHECK_WITH(ConfigError, ok, optimizer, " option ", option, ": expected ", range, ", got ",
                 value, ".");
}

bool same_tensor(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || at::equal(a, b));
}

}  // namespace smp::optim::detail
