// SPDX-License-Identifier: Apache-2.0
#include "smp/tensor_parallelism.h"

#include <utility>

#include "core/check.h"
#include "graph/tracer.h"
#include "runtime/parameters/scope_notes.h"
#include "runtime/runtime.h"

namespace smp {
namespace {

using runtime::Runtime;
using runtime::tensor_parallelism_marks;
using runtime::TensorParallelismMark;

std::optional<TensorParallelismMark>& innermost() {
  static thread_local std::optional<TensorParallelismMark> mark;
  return mark;
}

}  // namespace

/// Notes the results of all operators while it lives.
class TensorParallelismScope::Impl {
 public:
  explicit Impl(const TensorParallelismMark& mark) : before_(std::exchange(innermost(), mark)) {
    if (graph::Tracer::current() != nullptr) return;
    noter_.emplace(
        [](const at::Tensor& tensor) { tensor_parallelism_marks().set(tensor, *innermost()); });
  }
  ~Impl() { innermost() = before_; }

 private:
  std::optional<TensorParallelismMark> before_;
  std::optional<runtime::ResultNoter> noter_;
};

TensorParallelismScope::TensorParallelismScope(bool enabled,
                                               const TensorParallelismOptions& options)
    : impl_(std::make_unique<Impl>(TensorParallelismMark{enabled, options})) {}

TensorParallelismScope::~TensorParallelismScope() = default;

std::optional<bool> TensorParallelismScope::current() {
  return innermost() ? std::optional(innermost()->enabled) : std::nullopt;
}

TensorParallelismOptions TensorParallelismScope::current_options() {
  return innermost() ? innermost()->options : TensorParallelismOptions();
}

TensorParallelismScope tensor_parallelism(bool enabled, const TensorParallelismOptions& options) {
  return TensorParallelismScope(enabled, options);
}

void detail::mark_module(const torch::nn::Module& module, bool enabled,
                         const TensorParallelismOptions& options) {
  SMP_CHECK_WITH(UsageError, !Runtime::exists() || !Runtime::get().partitioned(),
                 "smp::set_tensor_parallelism was called after the first step, which divided the "
                 "models among the ranks; call it before");
  const auto parameters = module.parameters();
  SMP_CHECK_WITH(UsageError, !parameters.empty(), "smp::set_tensor_parallelism: module ",
                 module.name(),
                 " has no parameters that could be divided. Give it the module that "
                 "holds them");
  for (const at::Tensor& parameter : parameters) {
    tensor_parallelism_marks().set(parameter, {enabled, options});
  }
}

}  // namespace smp
