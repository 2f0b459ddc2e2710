// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>

namespace smp::graph {

/// The arguments of a call of an autograd engine.
struct BackwardPass {
  const torch::autograd::edge_list& roots;
  const torch::autograd::variable_list& gradients;  ///< gradients of the roots
  bool keep_graph;
  bool create_graph;
  bool accumulate;                           ///< into `.grad`, as `backward()` does
  const torch::autograd::edge_list& inputs;  ///< inputs whose gradients are returned
};

/// Sees every operator that code on this thread calls, at the level the code called it
/// (`aten::conv2d`, not its kernels). See docs/capture.md for the mechanism: a boxed fallback on
/// `DispatchKey::DeferredInit`, which lies above autograd and autocast.
class OperatorInterceptor {
 public:
  virtual ~OperatorInterceptor() = default;

  /// Called instead of the operator, with its arguments on `stack`; must replace them by the
  /// results. Operators called from inside are not intercepted.
  virtual void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;

  /// Called when code on the thread, not an operator, begins to apply a custom
  /// `torch::autograd::Function`; no operator call tells.
  virtual void custom_function() {}
  /// Called by `retain_grad()` of a tensor, which is no operator either.
  virtual void retain_grad() {}
  /// Called when code on the thread, not an operator, begins a backward pass: `backward()` of a
  /// tensor or `autograd::grad`. Returns the gradients of the pass's inputs, or nothing if the
  /// engine is to compute them.
  virtual std::optional<torch::autograd::variable_list> differentiate(const BackwardPass&) {
    return std::nullopt;
  }
};

/// While it lives, operators of this thread go to `interceptor`. Scopes nest; the innermost
/// one counts.
class InterceptScope {
 public:
  explicit InterceptScope(OperatorInterceptor& interceptor);
  /// While it lives, operators go to none: inside a `DeferredScope` tensors are made at once.
  InterceptScope();
  ~InterceptScope();
  InterceptScope(const InterceptScope&) = delete;
  InterceptScope& operator=(const InterceptScope&) = delete;

  /// For the scope's interceptor: calls the outer scope's interceptor or, without one, the operator
  /// itself.
  void call_outer(const c10::OperatorHandle& op, torch::jit::Stack& stack) const;

 private:
  explicit InterceptScope(OperatorInterceptor* interceptor);

  OperatorInterceptor* previous_;
  std::unique_ptr<at::functorch::FuncTorchTLSBase> previous_watcher_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

/// True where the operators that this thread calls go to an interceptor: not inside one that was
/// intercepted, such as a leaf.
bool intercepting();

/// Tells the interceptor of this thread, if there is one in force, that a backward pass begins, and
/// returns its answer.
std::optional<torch::autograd::variable_list> announce_backward(const BackwardPass& pass);

/// While it lives, no interceptor sees the operators of this thread.
class UninterceptedScope {
 public:
  UninterceptedScope();

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

}  // namespace smp::graph
