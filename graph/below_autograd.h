// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

namespace smp::graph {

/// The key of tensors, or included by a thread, whose calls are seen below autograd and above the
/// kernels, so that the parts of a composite operator are seen. libtorch does not use it.
constexpr auto kBelowAutograd = c10::DispatchKey::Fake;

/// Sees the call of an operator with its arguments on `stack`, which it may change. Returns whether
/// it has replaced them by the results; if not, the operator is called.
using BelowAutograd = bool (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Has `see` look at all calls on the key, after those that were given before. To be called while
/// the library is loaded, once.
bool see_below_autograd(BelowAutograd see);

/// Puts a tensor on the key, or takes it off. It keeps its identity.
void set_seen(const at::Tensor& tensor, bool seen);
/// Whether a tensor is on the key; false for an undefined one.
bool is_seen(const at::Tensor& tensor);

/// While it lives, tensors are off the key.
class UnseenScope {
 public:
  explicit UnseenScope(const std::vector<at::Tensor>& tensors);
  ~UnseenScope();
  UnseenScope(const UnseenScope&) = delete;
  UnseenScope& operator=(const UnseenScope&) = delete;

 private:
  std::vector<at::Tensor> seen_;
};

}  // namespace smp::graph
