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

std::optional<bool>& innermost() {
  static thread_local std::optional<bool> enabled;
  return enabled;
}

}  // namespace

/// Notes the results of all operators while it lives.
class TensorParallelismScope::Impl {
 public:
  explicit Impl(bool enabled) : before_(std::exchange(innermost(), enabled)) {
    if (graph::Tracer::current() != nullptr) return;
    noter_.emplace(
        [](const at::Tensor& tensor) { tensor_parallelism_marks().set(tensor, *innermost()); });
  }
  ~Impl() { innermost() = before_; }

 private:
  std::optional<bool> before_;
  std::optional<runtime::ResultNoter> noter_;
};

TensorParallelismScope::TensorParallelismScope(bool enabled)
    : impl_(std::make_unique<Impl>(enabled)) {}

TensorParallelismScope::~TensorParallelismScope() = default;

std::optional<bool> TensorParallelismScope::current() { return innermost(); }

TensorParallelismScope tensor_parallelism(bool enabled) { return TensorParallelismScope(enabled); }

void detail::mark_module(const torch::nn::Module& module, bool enabled) {
  SMP_CHECK_WITH(UsageError, !Runtime::exists() || !Runtime::get().partitioned(),
                 "smp::set_tensor_parallelism was called after the first step, which divided the "
                 "models among the ranks; call it before");
  const auto parameters = module.parameters();
  SMP_CHECK_WITH(UsageError, !parameters.empty(), "smp::set_tensor_parallelism: module ",
                 module.name(), " has no parameters that could be divided. Give it the module that "
                 "holds them");
  for (const at::Tensor& parameter : parameters) tensor_parallelism_marks().set(parameter, enabled);
}

}  // namespace smp
