// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/placing.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/heap.h"
#include "core/log.h"
#include "graph/memory_layout.h"
#include "graph/visit.h"
#include "partitioner/checkpointing.h"
#include "partitioner/format.h"
#include "partitioner/report.h"
#include "runtime/model.h"
#include "runtime/parameters/delayed.h"
#include "runtime/parameters/dividing.h"
#include "runtime/parameters/foreign.h"
#include "runtime/parameters/parameter_shards.h"
#include "runtime/parameters/placement.h"
#include "runtime/parameters/storage.h"

namespace smp::runtime {
namespace {

/// Why each parameter and buffer that an operator of its owner's uses is there, by name.
std::map<std::string, std::string> reasons_of(const graph::Graph& graph,
                                              const partitioner::Plan& plan) {
  std::map<std::string, std::string> reasons;
  for (size_t i = 0; i < graph.operators.size(); ++i) {
    graph::for_each_argument(graph.operators[i], [&](graph::ValueId id) {
      const auto owner = plan.owner.find(graph.values[id].name);
      if (owner == plan.owner.end()) return;
      const int rank = plan.rank_of_stage[plan.stage_of_operator[i]];
      if (plan.rank_of_stage[owner->second] != rank) return;
      reasons.emplace(owner->first, c10::str("operator ", i, " (", graph.operators[i].name(),
                                             ") uses it; ", plan.reason_of_operator[i]));
    });
  }
  return reasons;
}

/// Gives every parameter and buffer an owner, and the reason. Tensors that no operator reads have
/// to live somewhere, too. A later graph that does read it will most likely do so beside the tensor
/// registered before it.
void settle_owners(Runtime& runtime, const graph::Graph& graph, const partitioner::Plan& plan) {
  const auto reasons = reasons_of(graph, plan);
  int last = 0;
  for (const auto& entry : runtime.table().entries()) {
    const auto planned = plan.owner.find(entry.name);
    const auto pin = entry.pin();
    if (planned != plan.owner.end()) {
      last = plan.rank_of_stage[planned->second];
    } else if (pin) {
      last = *pin;
    }
    const auto reason = reasons.find(entry.name);
    runtime.table().set_owner(entry.name, runtime.topology().axis(CommGroup::kPp), last,
                              reason != reasons.end() ? reason->second
                              : pin
                                  ? "pinned; no operator of the first step uses it"
                                  : "no operator of the first step uses it; it stays with what was "
                                    "registered before it");
  }
}

/// The bytes of its storage between which a tensor lies.
std::pair<int64_t, int64_t> range_of(const at::Tensor& tensor) {
  const int64_t begin = tensor.storage_offset() * tensor.element_size();
  const int64_t span = graph::span_of(tensor.sizes(), tensor.strides());
  return {begin, begin + span * tensor.element_size()};
}

/// Two ranks would have a copy each of memory that one process has once.
void check_overlaps(const ParameterTable& table) {
  using Entries = std::vector<const ParameterTable::Entry*>;
  std::map<const c10::StorageImpl*, Entries> by_storage;
  for (const auto& entry : table.entries()) {
    const Entries& others = by_storage[entry.tensor.storage().unsafeGetStorageImpl()];
    const auto [begin, end] = range_of(entry.tensor);
    for (const auto* other : others) {
      const auto [other_begin, other_end] = range_of(other->tensor);
      const bool overlap = std::max(begin, other_begin) < std::min(end, other_end);
      SMP_CHECK_WITH(UsageError, !overlap || other->owner() == entry.owner(), "\"", other->name,
                     "\" and \"", entry.name, "\" lie on the same memory, and partitions ",
                     *other->owner(), " and ", *entry.owner(),
                     " would each have a copy of it. Register one tensor under both names, or keep "
                     "what uses them on one partition with smp::partition");
    }
    by_storage[entry.tensor.storage().unsafeGetStorageImpl()].push_back(&entry);
  }
}

/// Whether this rank keeps memory for a parameter or buffer: for buffers, for its own parameters,
/// and for those that lie beside others.
bool keeps(const Runtime& runtime, const ParameterTable::Entry& entry) {
  return !entry.is_parameter() || runtime.owns(entry) || entry.shares_storage_in(runtime.table());
}

/// Frees other ranks' tensors, and makes them absent for the program.
void release_others(Runtime& runtime) {
  for (const auto& entry : runtime.table().entries()) {
    const bool kept = keeps(runtime, entry);
    if (is_foreign(runtime, entry)) {
      release_gradient(runtime, entry);
      const auto absence = absence_of(entry);
      kept ? graph::become_absent(entry.tensor, absence)
           : graph::release_as_absent(entry.tensor, absence);
    }
    if (!kept) runtime.table().set_waiting(entry.name, {});
  }
}

/// The only default that makes results other than those of the plain program.
void tell_clipping(const Job& job) {
  if (job.rank() > 0) return;
  core::log_info(c10::str(
      "sharded data parallelism: optimizer.step() clips gradients to a norm of ",
      job.config().sdp_gradient_clipping(),
      " over all of them (\"sdp_gradient_clipping\"); a value that no norm reaches, such as 1e9, "
      "leaves them as they are"));
}

/// Leaves this rank its part of each parameter, one after the other: the part is made if it has no
/// data, then divided among the ranks of the tensor-parallel group, moved to the device, then
/// divided among replicas.
class Holding {
 public:
  Holding(Runtime& runtime, const Splits& splits) : runtime_(runtime), splits_(splits) {}

  void run() {
    const auto hold = [this](const ParameterTable::Entry& entry) { hold_part(entry); };
    try {
      if (runtime_.config().sharded_data_parallel_degree() > 1) {
        tell_clipping(runtime_);
        runtime_.first_step.parameter_shards = std::make_shared<ParameterShards>(runtime_, hold);
        forget_copies(runtime_);
      } else {
        for (const auto& entry : runtime_.table().entries()) hold(entry);
      }
    } catch (const c10::OutOfMemoryError& error) {
      refuse(error);
    }
  }

 private:
  void hold_part(const ParameterTable::Entry& entry) {
    last_ = &entry;
    if (keeps(runtime_, entry)) make_values(entry);
    const auto split = splits_.find(entry.name);
    if (split != splits_.end()) divide_parameter(runtime_, entry, split->second);
    move_in(runtime_, entry);
    if (keeps(runtime_, entry)) held_ += bytes(entry);
  }

  /// That this rank is to hold, before replicas divide it.
  int64_t bytes(const ParameterTable::Entry& entry) const {
    const auto split = splits_.find(entry.name);
    const bool is_whole = split != splits_.end() && !entry.is_divided();
    const auto size = static_cast<int64_t>(entry.tensor.nbytes());
    return is_whole ? size / split->second.ranks : size;
  }

  [[noreturn]] void refuse(const c10::OutOfMemoryError& error) const {
    int64_t all = 0;
    for (const auto& entry : runtime_.table().entries()) {
      if (keeps(runtime_, entry)) all += bytes(entry);
    }
    using partitioner::format_bytes;
    core::fail<PartitionError>(
        "the model does not fit: of ", format_bytes(all), " of parameters and buffers that rank ",
        runtime_.rank(), " owns, ", format_bytes(held_), " are on ", runtime_.device(), ", and \"",
        last_->name, "\" of ", format_bytes(bytes(*last_)), " found no room (",
        error.what_without_backtrace(),
        "). Use more partitions, a tensor_parallel_degree, a sharded_data_parallel_degree or half "
        "precision, or set \"memory_limit_mb\" so that the partition balances memory");
  }

  Runtime& runtime_;
  const Splits& splits_;
  const ParameterTable::Entry* last_ = nullptr;
  int64_t held_ = 0;
};

}  // namespace

void apply_first_plan(Runtime& runtime, const PlannedGraph& planned, int microbatches,
                      const Splits& splits) {
  const graph::Graph& graph = *planned.graph;
  settle_owners(runtime, graph, planned.plan);
  runtime.first_step.graph = planned.graph;
  runtime.first_step.plan = std::make_shared<partitioner::Plan>(planned.plan);
  check_overlaps(runtime.table());
  release_others(runtime);
  core::return_freed_memory();  // memory of other ranks' tensors, and of the capture
  Holding(runtime, splits).run();
  core::return_freed_memory();  // memory of divided tensors
  const std::string report =
      partitioner::report(graph, planned.plan, step_model(runtime, planned, microbatches));
  if (runtime.rank() == 0 && runtime.topology().pp_size() > 1) core::log_info(report);
  for (const auto& model : runtime.models()) {
    model->set_partition_report(report);
    model->run_post_partition_hooks();
  }
}

}  // namespace smp::runtime
