// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/planning.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/log.h"
#include "partitioner/best_order.h"
#include "partitioner/format.h"
#include "partitioner/order.h"
#include "runtime/parameters/parameter_shards.h"
#include "runtime/step/checkpointed_modules.h"
#include "runtime/step/pipeline_choice.h"
#include "runtime/step/plan_file.h"

namespace smp::runtime {
namespace {

using partitioner::CheckpointedModules;
using partitioner::Plan;

/// The user's pins, by name.
partitioner::Owners pins_of(const Runtime& runtime) {
  partitioner::Owners pinned;
  for (const auto& entry : runtime.table().entries()) {
    if (const auto partition = entry.pin()) pinned.emplace(entry.name, *partition);
  }
  return pinned;
}

/// The owners of tensors, by name; nothing before partitioning.
partitioner::Owners owners_of(const Runtime& runtime) {
  partitioner::Owners owners;
  for (const auto& entry : runtime.table().entries()) {
    if (const auto owner = entry.owner()) owners.emplace(entry.name, *owner);
  }
  return owners;
}

/// Whether nothing but the devices' memory limits a plan.
bool limited_by_devices(const Runtime& runtime) {
  return runtime.config().memory_limit_mb() == 0 && runtime.first_step.device_share > 0;
}

class Planner {
 public:
  Planner(const Runtime& runtime, const std::shared_ptr<const graph::Graph>& graph,
          int microbatches)
      : runtime_(runtime),
        config_(runtime.config()),
        captured_(graph),
        ranks_(runtime.topology().pp_size()),
        step_(step_model(runtime, microbatches)) {}

  /// The predicted time of a step.
  double step_us() const {
    const auto regions = partitioner::find_module_regions(*captured_, modules_of_user());
    const graph::Graph graph = partitioner::with_regions(*captured_, regions);
    const auto options = options_for(graph, regions, limit());
    const Plan plan = partitioner::partition_in_best_order(graph, options);
    return plan_step(config_, runtime_.first_step.schedule,
                     partitioner::reordered(graph, plan.order), plan, ranks_,
                     options.step().in_order(plan.order), runtime_.partitioned())
        .simulation.makespan;
  }

  PlannedGraph run() const {
    const std::vector<CheckpointedModules> modules = modules_of_user();
    const bool chooses = captured_->trains() && config_.activation_checkpointing() == "auto";
    if (!chooses) {
      Plan plan = plan_with(modules, limit());
      return finish(std::move(plan), modules);
    }
    Plan plan = plan_with(modules, 0);
    auto chosen = choose(plan, modules);
    if (!chosen) {
      plan = plan_with(with_all_candidates(modules), limit());
      chosen = choose(plan, modules);
    }
    if (!chosen) fail(plan, modules);
    log_choice(plan, modules, *chosen);
    return finish(std::move(plan), *chosen);
  }

 private:
  int64_t limit() const { return step_.memory_limit(); }

  /// The plan when these modules run again, under a limit; 0: none.
  Plan plan_with(const std::vector<CheckpointedModules>& modules, int64_t limit) const {
    const auto regions = partitioner::find_module_regions(*captured_, modules);
    const graph::Graph graph = partitioner::with_regions(*captured_, regions);
    const auto options = options_for(graph, regions, limit);
    return runtime_.partitioned() ? partitioner::partition_in_best_order(graph, options)
                                  : plan_by_file(runtime_, graph, options);
  }

  /// How to partition the graph, whose regions run again.
  partitioner::PartitionOptions options_for(const graph::Graph& graph,
                                            const partitioner::Regions& regions,
                                            int64_t limit) const {
    auto options = partition_options(config_, ranks_, step_)
                       .owner(owners_of(runtime_))
                       .pinned(pins_of(runtime_))
                       .allow_empty_stages(runtime_.partitioned());
    options.step()
        .largest_region(partitioner::largest_region_bytes(*captured_, regions))
        .regions(regions)
        .memory_limit(limit);
    return options.placement(
        runtime_.partitioned()
            ? runtime_.first_step.plan->rank_of_stage
            : best_placement(config_, runtime_.first_step.schedule, graph, options));
  }

  std::vector<CheckpointedModules> modules_of_user() const {
    return captured_->trains() ? checkpointed_modules(runtime_)
                               : std::vector<CheckpointedModules>();
  }

  std::vector<CheckpointedModules> with_all_candidates(
      std::vector<CheckpointedModules> modules) const {
    for (std::string& module : partitioner::candidate_modules(*captured_)) {
      modules.push_back({{std::move(module)}, 1});
    }
    return modules;
  }

  std::optional<std::vector<CheckpointedModules>> choose(
      const Plan& plan, const std::vector<CheckpointedModules>& modules) const {
    return partitioner::choose_modules(*partitioner::in_order(captured_, plan.order), plan, step_,
                                       limit(), modules);
  }

  partitioner::Prediction predict(const Plan& plan,
                                  const std::vector<CheckpointedModules>& modules) const {
    return partitioner::predict_with(*partitioner::in_order(captured_, plan.order), plan, step_,
                                     modules);
  }

  /// Warns, as SMP documents it: only tensors kept by checkpointed modules are offloaded.
  void warn_without_effect(const partitioner::Regions& regions) const {
    if (!captured_->trains() || !regions.empty() || runtime_.rank() != 0) return;
    if (!config_.offload_activations() || runtime_.partitioned()) return;
    core::log_warning(
        "\"offload_activations\" has no effect: no module is checkpointed. Call "
        "smp::set_activation_checkpointing for some");
  }

  PlannedGraph finish(Plan plan, const std::vector<CheckpointedModules>& modules) const {
    PlannedGraph result;
    result.captured = captured_;
    result.graph = partitioner::in_order(captured_, plan.order);
    const auto& stages = plan.stage_of_operator;
    result.regions = partitioner::find_module_regions(*result.graph, modules, stages);
    warn_without_effect(result.regions);
    if (!result.regions.empty()) {
      partitioner::check_repeatable(*result.graph, result.regions);
      result.largest_region = partitioner::largest_region_bytes(*result.graph, result.regions);
      result.graph = std::make_shared<const graph::Graph>(
          partitioner::with_regions(*result.graph, result.regions, stages));
    }
    result.plan = std::move(plan);
    return result;
  }

  [[noreturn]] void fail(const Plan& plan, const std::vector<CheckpointedModules>& modules) const {
    const auto predicted = predict(plan, with_all_candidates(modules));
    const auto& memory = predicted.rank_memory;
    const auto most = std::max_element(memory.begin(), memory.end());
    core::fail<PartitionError>(
        "activation_checkpointing \"auto\": no choice of modules keeps the memory limit of ",
        partitioner::format_bytes(limit()), ": with all of them partition ", most - memory.begin(),
        " needs ", partitioner::format_bytes(*most),
        ". Raise \"memory_limit_mb\", use more partitions or smaller microbatches, or lower "
        "\"active_microbatches\"");
  }

  void log_choice(const Plan& plan, const std::vector<CheckpointedModules>& before,
                  const std::vector<CheckpointedModules>& chosen) const {
    if (runtime_.rank() != 0 || chosen.size() == before.size()) return;
    const auto without = predict(plan, before), with = predict(plan, chosen);
    const auto most = [](const partitioner::Prediction& predicted) {
      return partitioner::format_bytes(
          *std::max_element(predicted.rank_memory.begin(), predicted.rank_memory.end()));
    };
    std::string names;
    for (size_t i = before.size(); i < chosen.size(); ++i) {
      names += (names.empty() ? "" : ", ") + chosen[i].modules.front();
    }
    core::log_info(c10::str("Activation checkpointing: ", names,
                            " run again in the backward pass. A ", "partition needs ", most(with),
                            " at most, not ", most(without), ", and a step takes ",
                            partitioner::format_time(with.step_us), ", not ",
                            partitioner::format_time(without.step_us), ", as predicted."));
  }

  const Runtime& runtime_;
  const Config& config_;
  const std::shared_ptr<const graph::Graph>& captured_;
  const int ranks_;
  const partitioner::StepModel step_;
};

}  // namespace

PlannedGraph make_plan(Runtime& runtime, const std::shared_ptr<const graph::Graph>& graph,
                       int microbatches) {
  try {
    return Planner(runtime, graph, microbatches).run();
  } catch (const PartitionError& error) {
    if (!limited_by_devices(runtime)) throw;
    runtime.first_step.device_share = 0;
    PlannedGraph planned = Planner(runtime, graph, microbatches).run();
    if (runtime.rank() == 0) {
      core::log_warning(c10::str(
          "the model may not fit into the memory of the devices, and is tried all the same: ",
          core::text_without_prefix(error)));
    }
    return planned;
  }
}

partitioner::StepModel step_model(const Runtime& runtime, const PlannedGraph& planned,
                                  int microbatches) {
  return step_model(runtime, microbatches)
      .largest_region(planned.largest_region)
      .regions(planned.regions);
}

partitioner::StepModel step_model(const Runtime& runtime, int microbatches) {
  auto step = step_model(runtime.config(), runtime.topology().pp_size(), microbatches,
                         runtime.topology().rdp_size());
  step.shards(runtime.shards_of_replica());
  step.costs(runtime.first_step.costs);
  step.optimizer_states(runtime.first_step.state_factors);
  if (const ParameterShards* shards = runtime.parameter_shards()) {
    step.sharding().names(shards->names());
  }
  // One more is being written.
  if (!runtime.device().is_cpu()) step.messages(runtime.execution.messages_ahead + 1);
  if (limited_by_devices(runtime)) step.memory_limit(runtime.first_step.device_share);
  return step;
}

double predicted_step_us(const Runtime& runtime, const graph::Graph& graph, int microbatches) {
  // The caller owns it.
  const std::shared_ptr<const graph::Graph> captured(std::shared_ptr<void>(), &graph);
  try {
    return Planner(runtime, captured, microbatches).step_us();
  } catch (const PartitionError&) {
    return std::numeric_limits<double>::infinity();
  }
}

}  // namespace smp::runtime
