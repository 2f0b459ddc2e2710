// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

namespace torch::autograd {
class SavedVariableHooks;
}  // namespace torch::autograd

namespace smp::graph {

/// Decides the fate of the tensors that autograd's functions save for their backward. May be called
/// by the threads that run backwards, one at a time.
class SavedTensorKeeper {
 public:
  virtual ~SavedTensorKeeper() = default;

  /// A function saves `tensor`. The other two are called with the returned number.
  virtual size_t pack(const at::Tensor& tensor) = 0;
  /// The tensor is needed: one with the same content, sizes and strides, and without history. May
  /// be called several times while the function lives.
  virtual at::Tensor unpack(size_t number) = 0;
  /// The function has let go of the tensor.
  virtual void release(size_t number) noexcept = 0;
};

/// While it lives, a keeper is given every tensor that this thread's operators save, but for
/// numbers that libtorch wraps in a tensor. The innermost of nested scopes counts; null: autograd
/// keeps its tensors itself.
///
class SavedTensorScope {
 public:
  explicit SavedTensorScope(std::shared_ptr<SavedTensorKeeper> keeper);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  std::shared_ptr<SavedTensorKeeper> outer_;
};

/// The hooks that the engine gives autograd for a tensor that this thread saves; null without a
/// keeper.
std::unique_ptr<torch::autograd::SavedVariableHooks> hooks_of_saved_tensors();

}  // namespace smp::graph
