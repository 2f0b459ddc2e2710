// SPDX-License-Identifier: Apache-2.0
#include "tests/smp/faulty_gelu.h"

#include <ATen/ops/gelu_backward_cpu_dispatch.h>
#include <ATen/ops/gelu_cpu_dispatch.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>

namespace smp::testing {
namespace {

using Pass = GeluFault::Pass;

struct State {
  int calls = 0;
  int first = std::numeric_limits<int>::max();
  bool stays = false;
};

State& state(Pass pass) {
  static thread_local State states[2];
  return states[static_cast<int>(pass)];
}

at::Tensor computed(Pass pass, at::Tensor result) {
  State& now = state(pass);
  const int call = now.calls++;
  if (call == now.first || (now.stays && call > now.first)) {
    *static_cast<uint32_t*>(result.mutable_data_ptr()) ^= 1u << 22;  // the mantissa's first
  }
  return result;
}

at::Tensor gelu(const at::Tensor& self, c10::string_view approximate) {
  return computed(Pass::kForward, at::cpu::gelu(self, approximate));
}

at::Tensor gelu_backward(const at::Tensor& gradient, const at::Tensor& self,
                         c10::string_view approximate) {
  return computed(Pass::kBackward, at::cpu::gelu_backward(gradient, self, approximate));
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("gelu", TORCH_FN(gelu));
  m.impl("gelu_backward", TORCH_FN(gelu_backward));
}

}  // namespace

void GeluFault::plant(Pass pass, int first, bool stays) { state(pass) = {0, first, stays}; }

void GeluFault::clear() { state(Pass::kForward) = state(Pass::kBackward) = {}; }

int GeluFault::calls(Pass pass) { return state(pass).calls; }

}  // namespace smp::testing
