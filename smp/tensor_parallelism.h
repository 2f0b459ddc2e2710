// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <type_traits>

#include "smp/export.h"
#include "smp/tensor_parallelism_options.h"

namespace smp {

/// The result of `tensor_parallelism`; it lasts as long as it lives. Belongs to the thread that
/// made it.
class SMP_API TensorParallelismScope {
 public:
  explicit TensorParallelismScope(bool enabled, const TensorParallelismOptions& options = {});
  ~TensorParallelismScope();
  TensorParallelismScope(const TensorParallelismScope&) = delete;
  TensorParallelismScope& operator=(const TensorParallelismScope&) = delete;

  /// The setting of this thread's innermost scope; nothing outside of all.
  static std::optional<bool> current();
  /// And with which options.
  static TensorParallelismOptions current_options();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Marks modules made while the returned scope lives, or with `enabled = false` unmarks them: the
/// layers of marked modules may be divided among the ranks of a tensor-parallel group, as far as
/// the step function's graph allows and it is predicted to pay (docs/tensor_parallelism.md). The
/// innermost of nested scopes wins. Without a mark in the program the configuration's
/// `tensor_parallelism` decides. As documented for SMP's `smp.tensor_parallelism`.
///
/// Wishes of `options` about attention are refused in the first step (`UsageError`) where they
/// cannot be followed: for attention that ranks do not divide, with a `tensor_parallel_degree` of 1
/// too.
///
/// Example:
/// \code
///   {
///     const auto scope = smp::tensor_parallelism();
///     blocks = register_module("blocks", torch::nn::Sequential(Block(), Block()));
///   }
/// \endcode
[[nodiscard]] SMP_API TensorParallelismScope
tensor_parallelism(bool enabled = true, const TensorParallelismOptions& options = {});

namespace detail {
SMP_API void mark_module(const torch::nn::Module& module, bool enabled,
                         const TensorParallelismOptions& options);
}  // namespace detail

/// Marks `module` (a holder, a module or a pointer to one) and its submodules, or unmarks them; the
/// last call for a module wins, also over scopes. To be called before the first step. Throws
/// `UsageError` after it, and for a module without parameters.
template <class M>
void set_tensor_parallelism(const M& module, bool enabled = true,
                            const TensorParallelismOptions& options = {}) {
  if constexpr (std::is_base_of_v<torch::nn::Module, M>) {
    detail::mark_module(module, enabled, options);
  } else {
    detail::mark_module(*module, enabled, options);
  }
}

}  // namespace smp
