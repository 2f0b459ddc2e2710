// SPDX-License-Identifier: Apache-2.0
#include "graph/generator_scope.h"

#include <ATen/CPUGeneratorImpl.h>

#include <utility>

#include "graph/below_autograd.h"
#include "graph/devices.h"

namespace smp::graph {
namespace {

thread_local const GeneratorScope* current = nullptr;

bool takes_generator(const c10::Argument& argument) {
  const auto* optional = argument.type()->castRaw<c10::OptionalType>();
  const auto& type = optional == nullptr ? argument.type() : optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

/// Whether the kernel would draw from the default generator.
bool means_default(const c10::IValue& value) {
  if (value.isNone()) return true;
  const at::Generator generator = value.toGenerator();
  return !generator.defined() || generator == at::detail::getDefaultCPUGenerator();
}

}  // namespace

/// Looks at the operators below autograd.
struct GeneratorGiver {
  static bool see(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    // A thread that libtorch starts may take over the key, but not the scope.
    if (current != nullptr) current->give_to(op, stack);
    return false;
  }
  static inline const bool kSees = see_below_autograd(&see);
};

GeneratorScope::GeneratorScope(at::Generator generator)
    : generator_(std::move(generator)), previous_(current), include_(kBelowAutograd) {
  current = this;
}

GeneratorScope::GeneratorScope(uint64_t seed)
    : seed_(seed), previous_(current), include_(kBelowAutograd) {
  current = this;
}

GeneratorScope::~GeneratorScope() { current = previous_; }

void GeneratorScope::give_to(const c10::OperatorHandle& op, torch::jit::Stack& stack) const {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!takes_generator(arguments[i])) continue;
    c10::IValue& value = torch::jit::peek(stack, i, arguments.size());
    const bool on_cpu = !accelerator_of(op, stack).has_value();
    if (!on_cpu || !means_default(value)) continue;
    if (!generator_.defined()) generator_ = at::make_generator<at::CPUGeneratorImpl>(seed_);
    value = generator_;
  }
}

}  // namespace smp::graph
