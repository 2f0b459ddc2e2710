// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <utility>
#include <vector>

namespace smp::graph {

/// Whether an operator writes tensors that it does not return, by its schema, as `_foreach_mul_`
/// does with its list. In a graph they are results like that of `mul_`, with the history that they
/// have from then on: after those that it returns, as one list. A leaf has none, since it works on
/// buffers of its module.
bool has_written_results(const c10::OperatorHandle& op);

/// These tensors among the arguments of a call, which lie on top of the stack.
std::vector<at::Tensor> written_results(const c10::OperatorHandle& op,
                                        const torch::jit::Stack& stack);

/// Calls an operator by `call()`, which puts its results in place of the arguments on the stack;
/// its other results follow.
template <class Call>
void call_for_results(const c10::OperatorHandle& op, torch::jit::Stack& stack, const Call& call) {
  if (!has_written_results(op)) return call();
  std::vector<at::Tensor> written = written_results(op, stack);
  call();
  stack.push_back(std::move(written));
}

}  // namespace smp::graph
