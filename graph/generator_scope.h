// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

namespace smp::graph {

/// While it lives, operators that this thread calls draw from `generator` on the CPU where the call
/// names none or the default one: those that a composite operator or a module calls inside, too.
/// The process's default generator is neither read nor written, so other threads may draw from it.
/// See docs/capture.md for the mechanism (below_autograd.h).
///
/// Scopes nest; the innermost one counts. A kernel that asks for the default generator itself,
/// instead of taking a `Generator?` argument, is not reached; libtorch has none on the CPU.
class GeneratorScope {
 public:
  explicit GeneratorScope(at::Generator generator);
  /// Draws from a generator seeded with `seed`, which is made at the first draw: that takes as long
  /// as a launch of a kernel, and operators on a GPU do not need it.
  explicit GeneratorScope(uint64_t seed);
  ~GeneratorScope();
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  friend struct GeneratorGiver;
  void give_to(const c10::OperatorHandle& op, torch::jit::Stack& stack) const;

  mutable at::Generator generator_;  // undefined until it is made
  const uint64_t seed_ = 0;
  const GeneratorScope* const previous_;
  const c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace smp::graph
