// SPDX-License-Identifier: Apache-2.0
#include "graph/intercept.h"

#include <torch/library.h>

#include <utility>

namespace smp::graph {
namespace {

constexpr auto kKey = c10::DispatchKey::DeferredInit;

thread_local OperatorInterceptor* current_interceptor = nullptr;

void call(OperatorInterceptor* interceptor, const c10::OperatorHandle& op,
          torch::jit::Stack& stack) {
  if (interceptor == nullptr) {
    op.callBoxed(stack);
  } else {
    interceptor->call(op, stack);
  }
}

void intercept_operator(const c10::OperatorHandle& op, c10::DispatchKeySet,
                        torch::jit::Stack* stack) {
  // Excluding wins over including: the operator's own calls stay out of sight.
  const UninterceptedScope own;
  call(current_interceptor, op, *stack);
}

/// libtorch asks this object, which it has for functorch, whether the thread may do things that are
/// no operators.
class Watcher final : public at::functorch::FuncTorchTLSBase {
 public:
  std::unique_ptr<FuncTorchTLSBase> deepcopy() const override {
    return std::make_unique<Watcher>();
  }
  int64_t checkSupportsSingleLevelAutogradFunction() const override { return 0; }
  void checkSupportsCppAutogradFunction() const override {
    if (watching()) current_interceptor->custom_function();
  }
  void checkSupportsInplaceRequiresGrad() const override {}
  void checkSupportsRetainGrad() const override {
    if (watching()) current_interceptor->retain_grad();
  }

 private:
  /// A thread that libtorch starts may take over this object and the key, but not the interceptor.
  static bool watching() { return current_interceptor != nullptr && intercepting(); }
};

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept_operator>());
}

InterceptScope::InterceptScope(OperatorInterceptor& interceptor) : InterceptScope(&interceptor) {}

InterceptScope::InterceptScope() : InterceptScope(nullptr) {}

InterceptScope::InterceptScope(OperatorInterceptor* interceptor)
    : previous_(current_interceptor),
      previous_watcher_(
          std::exchange(at::functorch::functorchTLSAccessor(), std::make_unique<Watcher>())),
      include_(kKey) {
  current_interceptor = interceptor;
}

InterceptScope::~InterceptScope() {
  current_interceptor = previous_;
  at::functorch::functorchTLSAccessor() = std::move(previous_watcher_);
}

void InterceptScope::call_outer(const c10::OperatorHandle& op, torch::jit::Stack& stack) const {
  call(previous_, op, stack);
}

bool intercepting() {
  return c10::impl::tls_is_dispatch_key_included(kKey) &&
         !c10::impl::tls_is_dispatch_key_excluded(kKey);
}

std::optional<torch::autograd::variable_list> announce_backward(const BackwardPass& pass) {
  if (current_interceptor == nullptr || !intercepting()) return std::nullopt;
  return current_interceptor->differentiate(pass);
}

UninterceptedScope::UninterceptedScope() : exclude_(kKey) {}

}  // namespace smp::graph
