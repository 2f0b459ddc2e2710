#include "runtime/step/setup.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <sstream>

#include "core/check.h"
#include "core/heap.h"
#include "core/log.h"
#include "graph/profile.h"
#include "graph/recording.h"
#include "graph/serialize.h"
#include "graph/visit.h"
#include "partitioner/checkpointing.h"
#include "partitioner/cost.h"
#include "partitioner/report.h"
#include "runtime/first_difference.h"
#include "runtime/model.h"
#include "runtime/parameters/delayed.h"
#include "runtime/parameters/dividing.h"
#include "runtime/parameters/sharding.h"
#include "runtime/parameters/storage.h"
#include "runtime/step/checkpointed_modules.h"
#include "runtime/step/pipeline_choice.h"

namespace smp::runtime {
namespace {

using graph::ValueKind;

/// Names, shapes and types of everything registered, and what runs again, one line each.
std::string describe_models(const Runtime& runtime) {
  std::ostringstream out;
  for (const auto& entry : runtime.table().entries()) {
    out << graph::to_string(entry.kind) << " " << entry.name << " : "
        << graph::TensorMeta::of(entry.tensor).to_string();
    for (const auto& alias : entry.aliases) out << " = " << alias;
    if (graph::is_deferred(entry.tensor)) out << " (delayed)";
    if (entry.split) out << ", a part of " << entry.split->to_string();
    out << "\n";
  }
  for (const auto& modules : checkpointed_modules(runtime)) {
    out << "checkpointed, in groups of " << modules.group << ":";
    for (const auto& module : modules.modules) out << " " << module;
    out << "\n";
  }
  return out.str();
}

void check_same_models(const Runtime& runtime) {
  const auto all = comm::all_gather_bytes(*runtime.world(), describe_models(runtime));
  const size_t other = first_other(all);
  if (other == 0) return;
  const auto [a, b] = first_difference(all[0], all[other]);
  detail::fail<UsageError>("the model differs between ranks: rank 0 has ", a, ", rank ", other,
                           " has ", b, ". Build the same model on every rank");
}

/// The device of this rank's models.
void settle_device(Runtime& runtime) {
  const auto& entries = runtime.table().entries();
  if (entries.empty()) return;
  const at::Device device = entries.front().tensor.device();
  for (const auto& entry : entries) {
    SMP_CHECK_WITH(UsageError, entry.tensor.device() == device, "\"", entries.front().name,
                   "\" is on device ", device, " and \"", entry.name, "\" on ",
                   entry.tensor.device(),
                   ". All parameters and buffers of a rank's models are on one device: move each "
                   "module before it is wrapped, net->to(torch::Device(torch::kCUDA, "
                   "smp::local_rank()))");
  }
  runtime.use_device(device);
}

void broadcast_values(const Runtime& runtime) {
  at::NoGradGuard no_grad;
  for (const auto& entry : runtime.table().entries()) {
    if (graph::is_deferred(entry.tensor)) continue;
    const at::Tensor copy = entry.tensor.detach().cpu().contiguous();
    (entry.split ? runtime.same_parts() : runtime.world())->broadcast(copy, 0);
    if (!copy.is_alias_of(entry.tensor)) entry.tensor.detach().copy_(copy);
  }
}

/// The seed that the user set, or that the default generator of world rank 0 has.
void settle_seed(Runtime& runtime) {
  if (runtime.progress.seed) return;
  const int64_t configured = runtime.config().seed();
  uint64_t seed = configured >= 0 ? static_cast<uint64_t>(configured)
                                  : at::detail::getDefaultCPUGenerator().current_seed();
  const std::string bytes = comm::broadcast_bytes(
      *runtime.world(), std::string(reinterpret_cast<const char*>(&seed), sizeof(seed)), 0);
  std::copy_n(bytes.data(), sizeof(seed), reinterpret_cast<char*>(&seed));
  runtime.progress.seed = seed;
}

/// Whether the graph cannot run on one rank alone, since ranks of a tensor-parallel group have
/// divided its parameters or exchange values in it.
bool runs_in_group(const Runtime& runtime, const graph::Graph& graph) {
  const auto is_part = [&](const graph::Value& value) {
    return value.kind == ValueKind::kParameter && runtime.table().at(value.name).split;
  };
  const auto exchanges = [](const graph::Operator& op) {
    return op.name().rfind("smp::tp_", 0) == 0;
  };
  return runtime.is_tensor_parallel() &&
         (std::any_of(graph.values.begin(), graph.values.end(), is_part) ||
          std::any_of(graph.operators.begin(), graph.operators.end(), exchanges));
}

/// A measurement on a busy machine is best repeated.
constexpr int kMeasuredRuns = 3;

graph::Environment whole_environment(const Runtime& runtime, const graph::Graph& graph,
                                     const std::vector<at::Tensor>& inputs) {
  graph::Environment environment(graph.values.size());
  for (size_t id = 0; id < graph.values.size(); ++id) {
    const graph::Value& value = graph.values[id];
    if (value.kind == ValueKind::kInput) environment[id] = inputs[std::stoul(value.name)].clone();
    if (value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer) {
      environment[id] = runtime.table().at(value.name).tensor;
    }
    if (value.content.defined()) environment[id] = value.content.clone();
  }
  return environment;
}

}  // namespace

void prepare_models(Runtime& runtime) {
  SMP_CHECK_WITH(UsageError, !runtime.models().empty(),
                 "a step function ran, but no module was wrapped. Write smp::DistributedModel "
                 "model(net) before the first step and call model(x) in it");
  check_same_models(runtime);
  settle_device(runtime);
  broadcast_values(runtime);
  settle_seed(runtime);
  // Read once, so that ranks of other hosts run the same.
  const std::string schedule = runtime.rank() == 0 ? read_schedule(runtime.config()) : "";
  runtime.first_step.schedule = comm::broadcast_bytes(*runtime.world(), schedule, 0);
  if (has_delayed(runtime)) {
    agree_on_construction(runtime);
    make_shared_tensors(runtime);
  }
}

void measure_costs_once(Runtime& runtime, graph::Graph& graph,
                        const std::vector<at::Tensor>& inputs, const graph::RandomKey& key,
                        const std::vector<uint64_t>& checksums, const std::string& step_name) {
  const size_t other =
      first_other(comm::all_gather_bytes(*runtime.world(), std::to_string(graph.fingerprint())));
  SMP_CHECK_WITH(UsageError, other == 0, "step function \"", step_name,
                 "\" calls other operators on rank ", other, " than on rank 0 in its first step. "
                 "All replicas must begin with the same step function on inputs of the same shape");
  const Config& config = runtime.config();
  const bool times = config.trace_execution_times();
  if (config.skip_tracing() || runs_in_group(runtime, graph)) {
    partitioner::estimate_costs(graph, nullptr);
  } else if (runtime.rank() == 0) {
    const BufferRestorer restorer(runtime);
    graph::measure_costs(graph, whole_environment(runtime, graph, inputs), key, checksums,
                         step_name,
                         graph::MeasureOptions()
                             .runs(times ? kMeasuredRuns : 1)
                             .memory(config.trace_memory_usage()));
    if (!times) partitioner::estimate_times(graph);
  }
  const std::string bytes =
      comm::broadcast_bytes(*runtime.world(), graph::costs_to_bytes(graph), 0);
  graph::costs_from_bytes(graph, bytes);
}

void save_first_graph(const Runtime& runtime, const graph::Graph& graph) {
  const auto path = runtime.config().graph_file();
  if (path && runtime.rank() == 0) graph::save_graph(graph, *path);
}

/// Why each parameter and buffer that an operator of its owner's uses is there, by name.
static std::map<std::string, std::string> reasons_of(const graph::Graph& graph,
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

/// Gives every parameter and buffer an owner, and the reason. What no operator reads has to live
/// somewhere. A later graph that does read it will most likely do so beside what was registered
/// before it.
static void settle_owners(Runtime& runtime, const graph::Graph& graph,
                          const partitioner::Plan& plan) {
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
    runtime.table().set_owner(entry.name, last,
                              reason != reasons.end() ? reason->second
                              : pin
                                  ? "pinned; no operator of the first step uses it"
                                  : "no operator of the first step uses it; it stays with what was "
                                    "registered before it");
  }
}

void apply_first_plan(Runtime& runtime, const PlannedGraph& planned, int microbatches,
                      const Splits& splits) {
  const graph::Graph& graph = *planned.graph;
  settle_owners(runtime, graph, planned.plan);
  runtime.first_step.graph = planned.graph;
  runtime.first_step.plan = std::make_shared<partitioner::Plan>(planned.plan);
  for (const auto& entry : runtime.table().entries()) {
    if (entry.is_parameter() && !runtime.owns(entry)) release_data(entry.tensor);
  }
  if (runtime.config().sharded_data_parallel_degree() > 1) {
    runtime.first_step.sharding = std::make_shared<Sharding>(runtime);
  }
  divide_parameters(runtime, splits);
  core::return_freed_memory();  // what belongs to other ranks now, and what the capture took
  make_own_parameters(runtime);
  const std::string report =
      partitioner::report(graph, planned.plan,
                          step_model(runtime.config(), runtime.topology().pp_size(), microbatches,
                                     runtime.topology().rdp_size())
                              .largest_region(planned.largest_region));
  if (runtime.rank() == 0 && runtime.topology().pp_size() > 1) log_info(report);
  for (const auto& model : runtime.models()) {
    model->set_partition_report(report);
    model->run_post_partition_hooks();
  }
}

BufferRestorer::BufferRestorer(const Runtime& runtime) {
  at::NoGradGuard no_grad;
  for (const auto& entry : runtime.table().entries()) {
    if (entry.is_parameter()) continue;
    saved_.emplace_back(entry.tensor, entry.tensor.detach().clone());
  }
}

BufferRestorer::~BufferRestorer() {
  at::NoGradGuard no_grad;
  for (auto& [buffer, copy] : saved_) {
    // What `forward` wrote into it left a history; detach_() would refuse views.
    if (buffer.requires_grad()) buffer.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
    buffer.copy_(copy);
  }
}

}  // namespace smp::runtime
