#include "smp/partition_scope.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "graph/intercept.h"
#include "graph/partition_scope.h"
#include "graph/tracer.h"
#include "smp/core/error.h"
#include "smp/runtime.h"

namespace smp {
namespace {

/// The pins of tensors. A tensor is known by its identity and by its storage: registering one may
/// make another tensor on the same storage (`torch::empty` does), and `module->to(dtype)` gives
/// the same tensor another storage. Nothing is kept alive.
class Pins {
 public:
  /// Of this thread: a rank that is a thread builds its own module.
  static Pins& of_thread() {
    static thread_local Pins pins;
    return pins;
  }

  void set(const at::Tensor& tensor, int partition) {
    drop_expired();
    tensors_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                              Pin<c10::TensorImpl>{partition, weak(tensor)});
    if (!tensor.has_storage()) return;
    storages_.insert_or_assign(
        tensor.storage().unsafeGetStorageImpl(),
        Pin<c10::StorageImpl>{partition, c10::weak_intrusive_ptr<c10::StorageImpl>(
                                             tensor.storage().getWeakStorageImpl())});
  }

  int find(const at::Tensor& tensor) const {
    const auto found = tensors_.find(tensor.unsafeGetTensorImpl());
    if (found != tensors_.end() && !found->second.object.expired()) return found->second.partition;
    if (!tensor.has_storage()) return -1;
    const auto storage = storages_.find(tensor.storage().unsafeGetStorageImpl());
    const bool known = storage != storages_.end() && !storage->second.object.expired();
    return known ? storage->second.partition : -1;
  }

 private:
  template <class T>
  struct Pin {
    int partition;
    c10::weak_intrusive_ptr<T> object;  // keeps the address from being used again
  };

  static c10::weak_intrusive_ptr<c10::TensorImpl> weak(const at::Tensor& tensor) {
    return c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr());
  }

  /// Temporaries are noted too; they go whenever the tables have doubled.
  void drop_expired() {
    if (tensors_.size() + storages_.size() < limit_) return;
    drop_expired(tensors_);
    drop_expired(storages_);
    limit_ = std::max(kLimit, 2 * (tensors_.size() + storages_.size()));
  }

  template <class Map>
  static void drop_expired(Map& map) {
    for (auto it = map.begin(); it != map.end();) {
      it = it->second.object.expired() ? map.erase(it) : std::next(it);
    }
  }

  static constexpr size_t kLimit = 1024;

  size_t limit_ = kLimit;
  ska::flat_hash_map<const c10::TensorImpl*, Pin<c10::TensorImpl>> tensors_;
  ska::flat_hash_map<const c10::StorageImpl*, Pin<c10::StorageImpl>> storages_;
};

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
class PartitionScope::Impl final : public graph::OperatorInterceptor {
 public:
  explicit Impl(int partition) : scope_(partition) {
    if (graph::Tracer::current() == nullptr) intercept_.emplace(*this);
  }

  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    intercept_->call_outer(op, stack);
    const size_t returns = op.schema().returns().size();
    for (size_t i = stack.size() - returns; i < stack.size(); ++i) note(stack[i]);
  }

 private:
  static void note(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      Pins::of_thread().set(value.toTensor(), graph::current_partition());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) note(tensor);
    }
  }

  graph::PartitionScope scope_;
  std::optional<graph::InterceptScope> intercept_;
};

PartitionScope::PartitionScope(int partition) {
  check_partition(partition);
  impl_ = std::make_unique<Impl>(partition);
}

PartitionScope::~PartitionScope() = default;

PartitionScope partition(int index) { return PartitionScope(index); }

void detail::pin_module(const torch::nn::Module& module, int partition) {
  check_partition(partition);
  SMP_CHECK_WITH(UsageError, !Runtime::exists() || !Runtime::get().partitioned,
                 "smp::set_partition was called after the first step, which divided the models "
                 "among the ranks; call it before");
  const auto parameters = module.parameters();
  const auto buffers = module.buffers();
  SMP_CHECK_WITH(UsageError, !parameters.empty() || !buffers.empty(), "smp::set_partition: module ",
                 module.name(), " has neither parameters nor buffers. Put a scope around its call "
                 "in forward: const auto scope = smp::partition(", partition, ");");
  for (const auto* tensors : {&parameters, &buffers}) {
    for (const at::Tensor& tensor : *tensors) Pins::of_thread().set(tensor, partition);
  }
}

int pinned_partition(const at::Tensor& tensor) { return Pins::of_thread().find(tensor); }

static const Runtime& partitioned_runtime(const char* call) {
  const Runtime& runtime = Runtime::get();
  SMP_CHECK_WITH(UsageError, runtime.partitioned, call,
                 " was called before the first step, which partitions the models; use "
                 "register_post_partition_hook to be called as soon as it has");
  return runtime;
}

Placement get_partition(const at::Tensor& tensor) {
  const Runtime& runtime = partitioned_runtime("smp::get_partition");
  const auto* entry = runtime.table().find(tensor);
  SMP_CHECK_WITH(UsageError, entry != nullptr, "smp::get_partition: the tensor of shape ",
                 tensor.sizes(), " is no parameter or buffer of a DistributedModel");
  return {entry->name, runtime.owner.at(entry->name), runtime.owner_reason.at(entry->name)};
}

std::string explain_partition() {
  const Runtime& runtime = partitioned_runtime("smp::explain_partition");
  const graph::Graph& graph = *runtime.first_graph;
  const partitioner::Plan& plan = *runtime.first_plan;
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
