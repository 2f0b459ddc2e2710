#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace smp::graph {

/// Sees every operator that code on this thread calls, at the level the code called it
/// (`aten::conv2d`, not its kernels). See docs/capture.md for the mechanism: a boxed fallback on
/// `DispatchKey::DeferredInit`, which lies above autograd and autocast.
class OperatorInterceptor {
 public:
  virtual ~OperatorInterceptor() = default;

  /// Called instead of the operator, with its arguments on `stack`; must replace them by the
  /// results. Operators called from inside are not intercepted.
  virtual void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;
};

/// While it lives, operators of this thread go to `interceptor`. Scopes nest; the innermost
/// one counts.
class InterceptScope {
 public:
  explicit InterceptScope(OperatorInterceptor& interceptor);
  ~InterceptScope();
  InterceptScope(const InterceptScope&) = delete;
  InterceptScope& operator=(const InterceptScope&) = delete;

 private:
  OperatorInterceptor* previous_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace smp::graph
