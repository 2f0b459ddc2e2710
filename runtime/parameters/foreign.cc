// SPDX-License-Identifier: Apache-2.0
#include "runtime/parameters/foreign.h"

#include <set>
#include <string>

#include "dp/bucket_layout.h"
#include "graph/visit.h"
#include "runtime/precision.h"

namespace smp::runtime {
namespace {

constexpr auto kParameterRemedy =
    "Between steps go over model->local_parameters(), or local_named_parameters(), which are those "
    "of this rank; model->state_dict() has copies of all, on every rank. The model runs in a step "
    "function (smp::step), and as a plain module once model->cpu() has gathered it";

constexpr auto kBufferRemedy =
    "Between steps go over model->local_buffers(), or local_named_buffers(), which are those of "
    "this rank; model->state_dict() has copies of all, on every rank";

constexpr auto kShardRemedy =
    "It is whole only while a step function (smp::step) reads it. Use model->state_dict() for "
    "copies of all, model->virtual_named_parameters() for the shards of this rank, which may be "
    "changed, or gather the model with model->cpu()";

constexpr auto kGradientRemedy =
    "For norms over all gradients call smp::grad_norm(model) or smp::clip_grad_norm_(model, "
    "max_norm); for the gradients of this rank go over model->local_parameters(), or "
    "local_named_parameters(); an optimizer that does not pass over them is wrapped as "
    "smp::distributed(optimizer), which is for all but torch::optim::LBFGS: that needs "
    "\"partitions\": 1";

std::string owner_of(const ParameterTable::Entry& entry) {
  return c10::str(graph::to_string(entry.kind), " \"", entry.name, "\", which pp rank ",
                  *entry.owner(), " owns");
}

at::Tensor absent_gradient(const Runtime& runtime, const ParameterTable::Entry& entry) {
  const graph::Absence absence{"the gradient of " + owner_of(entry), kGradientRemedy};
  const auto type = half_type(runtime.config())
                        ? dp::sum_options(entry.tensor).dtype().toScalarType()
                        : entry.tensor.scalar_type();
  return graph::make_absent_like(entry.tensor, std::make_shared<graph::Absence>(absence), type);
}

/// The parameters that operators of a graph read where they record a history.
std::set<std::string> differentiated(const graph::Graph& graph) {
  std::set<std::string> names;
  for (const graph::Operator& op : graph.operators) {
    if (!op.mode.records_history()) continue;
    graph::for_each_argument(op, [&](graph::ValueId id) {
      const graph::Value& value = graph.values[id];
      const bool trains = value.kind == graph::ValueKind::kParameter && value.meta.requires_grad;
      if (trains) names.insert(value.name);
    });
  }
  return names;
}

}  // namespace

bool is_foreign(const Runtime& runtime, const ParameterTable::Entry& entry) {
  const bool changes = entry.is_parameter() || entry.is_written;
  return changes && !runtime.owns(entry) && entry.tensor.numel() > 0;
}

graph::AbsencePtr absence_of(const ParameterTable::Entry& entry) {
  graph::Absence absence;
  if (entry.shard()) {
    absence.what = c10::str("parameter \"", entry.name,
                            "\", which sharded data parallelism divides over ranks");
    absence.remedy = kShardRemedy;
    absence.ignores_writes = false;
  } else {
    absence.what = owner_of(entry);
    absence.remedy = entry.is_parameter() ? kParameterRemedy : kBufferRemedy;
  }
  return std::make_shared<graph::Absence>(std::move(absence));
}

void forget_copies(const Runtime& runtime) {
  for (const auto& entry : runtime.table().entries()) {
    const bool is_elsewhere = is_foreign(runtime, entry) || entry.shard();
    if (!is_elsewhere || graph::is_absent(entry.tensor)) continue;
    graph::become_absent(entry.tensor, absence_of(entry));
  }
}

ForeignGradients foreign_gradients(const Runtime& runtime, const graph::Graph& graph) {
  if (!graph.trains()) return {};
  ForeignGradients gradients;
  const auto names = differentiated(graph);
  for (const auto& entry : runtime.table().entries()) {
    if (!is_foreign(runtime, entry) || names.count(entry.name) == 0) continue;
    gradients.emplace_back(entry.tensor, absent_gradient(runtime, entry));
  }
  return gradients;
}

void release_gradient(const Runtime& runtime, const ParameterTable::Entry& entry) {
  at::Tensor& gradient = entry.tensor.mutable_grad();
  if (gradient.defined()) gradient = absent_gradient(runtime, entry);
}

}  // namespace smp::runtime
