// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace smp::graph::testing {

/// Counts, while it lives, how often this thread copies the elements of a parameter to memory of
/// another type.
class CastCounter {
 public:
  explicit CastCounter(std::vector<torch::Tensor> parameters) {
    watched() = std::move(parameters);
    count() = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&note).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  ~CastCounter() { at::removeCallback(handle_); }
  CastCounter(const CastCounter&) = delete;
  CastCounter& operator=(const CastCounter&) = delete;

  /// Those since the last call.
  static int take() { return std::exchange(count(), 0); }

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
    if (std::string(function.name()) != "aten::copy_") return nullptr;
    const torch::Tensor to = function.inputs()[0].toTensor();
    const torch::Tensor from = function.inputs()[1].toTensor();
    if (to.scalar_type() == from.scalar_type()) return nullptr;
    for (const torch::Tensor& parameter : watched()) {
      if (from.is_alias_of(parameter)) ++count();
    }
    return nullptr;
  }
  static std::vector<torch::Tensor>& watched() {
    static thread_local std::vector<torch::Tensor> tensors;
    return tensors;
  }
  static int& count() {
    static thread_local int count = 0;
    return count;
  }

  at::CallbackHandle handle_;
};

}  // namespace smp::graph::testing
