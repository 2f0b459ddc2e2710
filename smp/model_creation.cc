// SPDX-License-Identifier: Apache-2.0
#include "smp/model_creation.h"

#include <c10/core/ScalarType.h>

#include "core/check.h"
#include "graph/default_dtype.h"
#include "graph/deferred.h"
#include "graph/intercept.h"
#include "graph/partition_scope.h"
#include "runtime/parameters/delayed.h"
#include "runtime/runtime.h"
#include "smp/partition_scope.h"
#include "smp/tensor_parallelism.h"

namespace smp {

class ModelCreation::Impl {
 public:
  explicit Impl(const ModelCreationOptions& options);

 private:
  std::optional<graph::DefaultDtypeScope> dtype_;
  std::optional<graph::DeferredScope> delay_;
  std::optional<graph::InterceptScope> at_once_;  // within a scope that delays
  std::optional<PartitionScope> pins_;            // an outer smp::partition's, within this scope
  std::optional<TensorParallelismScope> marks_;   // given, or of an outer scope, within this one
};

ModelCreation::Impl::Impl(const ModelCreationOptions& options) {
  if (options.dtype()) {
    SMP_CHECK_WITH(UsageError, c10::isFloatingType(*options.dtype()),
                   "model_creation: dtype must be a floating point type such as torch::kBFloat16, "
                   "got ",
                   *options.dtype());
    dtype_.emplace(*options.dtype());
  }
  const bool delayed = options.delayed()
                           ? *options.delayed()
                           : runtime::Runtime::get().config().delayed_parameter_initialization();
  if (delayed) {
    delay_.emplace(
        graph::DeferredOptions().eager_bytes(options.eager_bytes()).fast(options.fast()));
  } else {
    at_once_.emplace();
  }
  if (graph::current_partition() >= 0) pins_.emplace(graph::current_partition());
  const auto& given = options.tensor_parallelism_options();
  if (options.tensor_parallelism()) {
    marks_.emplace(*options.tensor_parallelism(), given.value_or(TensorParallelismOptions()));
  } else {
    SMP_CHECK_WITH(UsageError, !given,
                   "model_creation: tensor_parallelism_options were given without "
                   "tensor_parallelism, which says whether to mark what is made. Set it, too");
    const auto outer = TensorParallelismScope::current();
    if (outer) marks_.emplace(*outer, TensorParallelismScope::current_options());
  }
}

ModelCreation::ModelCreation(const ModelCreationOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}

ModelCreation::~ModelCreation() = default;

ModelCreation model_creation(const ModelCreationOptions& options) { return ModelCreation(options); }

ModelCreation delayed_parameter_initialization(bool enabled) {
  return ModelCreation(ModelCreationOptions().delayed(enabled));
}

void materialize(const torch::nn::Module& module) { runtime::materialize(module); }

}  // namespace smp
