// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <type_traits>

#include "smp/export.h"

namespace smp {

/// The result of `partition`; it is in force as long as it lives, on the thread that made it.
/// Tensors made under it stay pinned, whichever thread runs the first step.
class SMP_API PartitionScope {
 public:
  explicit PartitionScope(int partition);
  ~PartitionScope();
  PartitionScope(const PartitionScope&) = delete;
  PartitionScope& operator=(const PartitionScope&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Pins the tensors made and the operators called while the returned scope lives to partition
/// `index` (a rank of the pipeline); the innermost of nested scopes wins.
///
/// Around the construction of modules it pins the parameters and buffers made inside, however the
/// modules register them: the operators that read them run on that partition. Around code in
/// `forward` it pins the operators called there, also those without parameters. The automatic
/// partition places the rest, or, with `auto_partition: false`, it goes to `default_partition`. A
/// partition may be visited several times.
///
/// As documented for SMP's `smp.partition(index)`; other than there, scopes count with
/// `auto_partition: true` too. Throws `UsageError` for a partition that does not exist.
///
/// Example:
/// \code
///   {
///     const auto scope = smp::partition(1);
///     fc = register_module("fc", torch::nn::Linear(128, 10));
///   }
/// \endcode
[[nodiscard]] SMP_API PartitionScope partition(int index);

namespace detail {
SMP_API void pin_module(const torch::nn::Module& module, int partition);
}  // namespace detail

/// Pins all parameters and buffers of `module` (a holder, a module or a pointer to one) and of its
/// submodules to partition `index`; the last call for a tensor wins, also over scopes. To be
/// called before the first step. Throws `UsageError` after it, for a partition that does not
/// exist, and for a module without parameters and buffers, whose operators only a scope around
/// its call can pin.
template <class M>
void set_partition(const M& module, int index) {
  if constexpr (std::is_base_of_v<torch::nn::Module, M>) {
    detail::pin_module(module, index);
  } else {
    detail::pin_module(*module, index);
  }
}

/// The partition that a scope or `set_partition` asked for; -1: none.
SMP_API int pinned_partition(const at::Tensor& tensor);

/// Where a parameter or buffer went, and why.
struct Placement {
  std::string name;   ///< dotted path
  int partition = 0;  ///< the rank of the pipeline that owns it
  std::string reason;
};

/// Where a parameter or buffer of a `DistributedModel` is. Throws `UsageError` before the first
/// step, which partitions the models, and for a tensor that belongs to none.
SMP_API Placement get_partition(const at::Tensor& tensor);

/// Where every operator of the first step function went, and why; one a line:
///
///     operator 3 (aten::linear) in fc1: partition 1, parameter fc1.weight is pinned
///
/// Throws `UsageError` before the first step.
SMP_API std::string explain_partition();

}  // namespace smp
