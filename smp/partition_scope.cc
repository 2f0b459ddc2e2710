// SPDX-License-Identifier: Apache-2.0
#include "smp/partition_scope.h"

#include <optional>
#include <sstream>

#include "core/check.h"
#include "graph/partition_scope.h"
#include "graph/tracer.h"
#include "runtime/parameters/scope_notes.h"
#include "runtime/runtime.h"

namespace smp {
namespace {

using runtime::partition_pins;
using runtime::Runtime;

void check_partition(int partition) {
  SMP_CHECK_WITH(UsageError, partition >= 0, "smp::partition: expected a partition from 0 on, got ",
                 partition);
  if (!Runtime::exists()) return;
  const int partitions = Runtime::get().topology().pp_size();
  SMP_CHECK_WITH(UsageError, partition < partitions, "smp::partition: there is no partition ",
                 partition, ": the configuration has \"partitions\": ", partitions,
                 ", so they are 0 to ", partitions - 1);
}

}  // namespace

/// Notes the results of all operators while it lives. Inside a step there is nothing to note: the
/// capture itself asks for the partition in force.
class PartitionScope::Impl {
 public:
  explicit Impl(int partition) : scope_(partition) {
    if (graph::Tracer::current() != nullptr) return;
    noter_.emplace(
        [](const at::Tensor& tensor) { partition_pins().set(tensor, graph::current_partition()); });
  }

 private:
  graph::PartitionScope scope_;
  std::optional<runtime::ResultNoter> noter_;
};

PartitionScope::PartitionScope(int partition) {
  check_partition(partition);
  impl_ = std::make_unique<Impl>(partition);
}

PartitionScope::~PartitionScope() = default;

PartitionScope partition(int index) { return PartitionScope(index); }

void detail::pin_module(const torch::nn::Module& module, int partition) {
  check_partition(partition);
  SMP_CHECK_WITH(UsageError, !Runtime::exists() || !Runtime::get().partitioned(),
                 "smp::set_partition was called after the first step, which divided the models "
                 "among the ranks; call it before");
  const auto parameters = module.parameters();
  const auto buffers = module.buffers();
  SMP_CHECK_WITH(UsageError, !parameters.empty() || !buffers.empty(), "smp::set_partition: module ",
                 module.name(),
                 " has neither parameters nor buffers. Put a scope around its call "
                 "in forward: const auto scope = smp::partition(",
                 partition, ");");
  for (const auto* tensors : {&parameters, &buffers}) {
    for (const at::Tensor& tensor : *tensors) partition_pins().set(tensor, partition);
  }
}

int pinned_partition(const at::Tensor& tensor) { return runtime::pinned_partition(tensor); }

static const Runtime& partitioned_runtime(const char* call) {
  const Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, runtime.partitioned(), call,
                 " was called before the first step, which partitions the models; use "
                 "register_post_partition_hook to be called as soon as it has");
  return runtime;
}

Placement get_partition(const at::Tensor& tensor) {
  const Runtime& runtime = partitioned_runtime("smp::get_partition");
  const auto* entry = runtime.table().find(tensor);
  SMP_CHECK_WITH(UsageError, entry != nullptr, "smp::get_partition: the tensor of shape ",
                 tensor.sizes(), " is no parameter or buffer of a DistributedModel");
  return {entry->name, *entry->owner(), entry->owner_reason};
}

std::string explain_partition() {
  const Runtime& runtime = partitioned_runtime("smp::explain_partition");
  const graph::Graph& graph = *runtime.first_step.graph;
  const partitioner::Plan& plan = *runtime.first_step.plan;
  std::ostringstream out;
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    const graph::Operator& op = graph.operators[i];
    out << "operator " << i << " (" << op.name() << ")";
    if (!op.scope.empty()) out << " in " << op.scope;
    out << ": partition " << plan.rank_of_stage[plan.stage_of_operator[i]] << ", "
        << plan.reason_of_operator[i] << "\n";
  }
  return out.str();
}

}  // namespace smp
