#include "graph/intercept.h"

#include <torch/library.h>

namespace smp::graph {
namespace {

constexpr auto kKey = c10::DispatchKey::DeferredInit;

thread_local OperatorInterceptor* current = nullptr;

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  // Excluding wins over including: what the operator calls itself stays out of sight.
  c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  if (current == nullptr) {
    op.callBoxed(stack);
  } else {
    current->call(op, *stack);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

InterceptScope::InterceptScope(OperatorInterceptor& interceptor)
    : previous_(current), include_(kKey) {
  current = &interceptor;
}

InterceptScope::~InterceptScope() { current = previous_; }

}  // namespace smp::graph
