// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/pipeline_choice.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/json.h"
#include "partitioner/best_order.h"
#include "partitioner/order.h"
#include "pipeline/generators.h"
#include "pipeline/predicted_costs.h"
#include "pipeline/ranking.h"
#include "pipeline/schedule_file.h"
#include "pipeline/verifier.h"

namespace smp::runtime {
namespace {

using partitioner::CostModel;
using pipeline::InFlight;
using pipeline::RankedSchedule;
using pipeline::Schedule;
using pipeline::ScheduleOptions;

class StepPlanner {
 public:
  StepPlanner(const Config& config, const std::string& file, const graph::Graph& graph,
              const partitioner::Plan& plan, int ranks, const partitioner::StepModel& model,
              bool settled)
      : config_(config),
        file_(file),
        trains_(graph.trains()),
        ranks_(ranks),
        settled_(settled),
        prediction_(partitioner::predict(graph, plan, model)),
        edges_(pipeline::edges_of(graph, plan)),
        options_(ScheduleOptions(plan.stages(), model.microbatches())
                     .ranks(ranks)
                     .rank_of_stage(plan.rank_of_stage)
                     .edges(pipeline::stage_edges(edges_))
                     .backward_of_stage(pipeline::backward_of_stage(graph, plan, edges_))
                     .active_microbatches(model.active_microbatches())
                     .costs(pipeline::predicted_costs(graph, plan, edges_, prediction_))
                     .memory_limit(activation_limits(plan, model.memory_limit()))) {}

  PlannedStep run() {
    std::string report;
    auto chosen = choose(report);
    return {std::move(chosen), std::move(prediction_), std::move(edges_), options_,
            std::move(report)};
  }

  /// How long the step takes with the best schedule, of several that come into question with the
  /// best of those that are made quickly.
  double shortest() const {
    if (is_chosen()) {
      return pipeline::rank_schedules(options_, pipeline::ListSearch::kIfNothingElseFits)
          .best()
          .simulation.makespan;
    }
    std::string report;
    return choose(report).simulation.makespan;
  }

 private:
  /// The bytes that a rank may keep for microbatches in flight, besides its parameters and working
  /// memory.
  std::vector<double> activation_limits(const partitioner::Plan& plan, int64_t limit) const {
    if (limit == 0) return {};
    std::vector<double> limits;
    for (const int64_t bytes : prediction_.rank_memory) {
      limits.push_back(static_cast<double>(limit - bytes));
    }
    for (int s = 0; s < plan.stages(); ++s) {
      limits[plan.rank_of_stage[s]] += static_cast<double>(prediction_.stages[s].activations);
    }
    for (double& limit : limits) limit = std::max(limit, 0.0);
    return limits;
  }

  /// The bytes beyond which a schedule does not run: the user's, and those that a list is made for.
  /// Nine tenths of a device are a guess, which others may exceed as plans may.
  std::vector<double> strict_limits(const std::string& schedule) const {
    const bool is_strict = config_.memory_limit_mb() > 0 || schedule == "list";
    return is_strict ? options_.memory_limit() : std::vector<double>();
  }

  /// Whether the schedule is the best of several.
  bool is_chosen() const { return trains_ && config_.pipeline() == "auto"; }

  RankedSchedule choose(std::string& report) const {
    if (is_chosen()) {
      const auto ranking = pipeline::rank_schedules(options_);
      report = c10::str("Schedules predicted (us):\n", pipeline::to_string(ranking));
      return ranking.choice();
    }
    std::string name = config_.pipeline();
    Schedule schedule = make(name, report);
    // Also verifies it.
    auto simulation =
        pipeline::simulate(schedule, options_.edges(), options_.costs(), strict_limits(name));
    if (name == "interleaved") {
      pipeline::verify(schedule, options_.edges(),
                       pipeline::VerifyOptions()
                           .credit(options_.microbatches())
                           .active_microbatches(options_.active_microbatches()));
    }
    return {std::move(name), std::move(schedule), std::move(simulation)};
  }

  /// `name` is the configured pipeline, and then the schedule's.
  Schedule make(std::string& name, std::string& report) const {
    if (!trains_) return generate(name = "forward_only");
    if (name == "file") return load();
    const core::Refusal misplaced = pipeline::schedule_kind(name).why_misplaced(options_);
    if (misplaced && (settled_ || ranks_ == 1)) {
      report = c10::str("The schedule \"", name, "\" cannot run ",
                        ranks_ == 1 ? "on one partition: " : "another graph of the program: ",
                        *misplaced, ". It runs \"interleaved\" instead.");
      name = "interleaved";
    }
    return generate(name);
  }

  Schedule generate(const std::string& name) const {
    return pipeline::lower(pipeline::make_schedule(name, options_), options_.edges());
  }

  Schedule load() const {
    Schedule schedule = pipeline::parse_schedule(file_);
    SMP_CHECK_WITH(ConfigError, schedule.ranks() == ranks_, *config_.schedule_file(),
                   ": the schedule has rows for ", schedule.ranks(), " ranks, the pipeline has ",
                   ranks_, ". Set \"partitions\" as the file needs it, or write another file.");
    const bool fits = schedule.rank_of_stage() == options_.rank_of_stage() &&
                      schedule.microbatches() == options_.microbatches();
    SMP_CHECK_WITH(ConfigError, fits, *config_.schedule_file(), ": the schedule is for ",
                   schedule.stages(), " stages on ranks ", c10::Join(",", schedule.rank_of_stage()),
                   " and ", schedule.microbatches(), " microbatches, the step has ",
                   options_.stages(), " stages on ranks ", c10::Join(",", options_.rank_of_stage()),
                   " and ", options_.microbatches(),
                   ". Set \"microbatches\" and \"virtual_stages\" as the file needs them, or write "
                   "another file.");
    schedule = pipeline::without_backwards(schedule, options_.backward_of_stage());
    SMP_CHECK_WITH(
        ConfigError, schedule.backward_of_stage() == options_.backward_of_stage(),
        *config_.schedule_file(),
        ": the schedule has no backward of some stages that need one. Write another file.");
    return pipeline::is_compute_order(schedule) ? pipeline::lower(schedule, options_.edges())
                                                : std::move(schedule);
  }

  const Config& config_;
  const std::string& file_;
  const bool trains_;
  const int ranks_;
  const bool settled_;
  partitioner::Prediction prediction_;
  std::vector<pipeline::Edge> edges_;
  const ScheduleOptions options_;
};

/// Where a schedule needs `stages` stages of each rank (0: as it needs); empty for one of each.
std::vector<int> placement_of(const std::string& name, int ranks, int stages) {
  const auto placed = pipeline::schedule_kind(name).place(ranks, stages, 1).rank_of_stage();
  return static_cast<int>(placed.size()) == ranks ? std::vector<int>() : placed;
}

/// The configuration's pipeline as schedules are called.
std::string schedule_name(const Config& config) {
  return config.pipeline() == "_only_forward" ? "forward_only" : config.pipeline();
}

/// The ways to place stages on ranks that come into question.
std::vector<std::vector<int>> placements(const Config& config, const std::string& file, int ranks) {
  const auto stages = static_cast<int>(config.virtual_stages());
  const std::string pipeline = schedule_name(config);
  if (ranks == 1) return {{}};
  if (pipeline == "file") return {pipeline::parse_schedule(file).rank_of_stage()};
  if (pipeline != "auto") return {placement_of(pipeline, ranks, stages)};
  if (stages == 1) return {{}};
  if (stages > 2) return {{}, placement_of("breadth_first", ranks, stages)};
  return {{}, placement_of("breadth_first", ranks, stages), placement_of("zbv", ranks, stages)};
}

partitioner::ReplicaSharding sharding_of(const Config& config, int replicas) {
  return partitioner::ReplicaSharding()
      .states(config.shard_optimizer_state() ? replicas : 1)
      .parameters(static_cast<int>(config.sharded_data_parallel_degree()))
      .smallest(config.sdp_param_persistence_threshold())
      .live(config.sdp_max_live_parameters())
      .bucket(config.sdp_reduce_bucket_size());
}

/// Microbatches in flight of a schedule by the configuration's name; the choice of "auto" is not
/// known yet.
InFlight in_flight_of(const std::string& pipeline) {
  if (pipeline == "file") return InFlight::kAll;
  return pipeline == "auto" ? InFlight::kRanks : pipeline::schedule_kind(pipeline).in_flight;
}

}  // namespace

std::string read_schedule(const Config& config) {
  if (config.pipeline() != "file") return "";
  return pipeline::to_string(pipeline::load_schedule(*config.schedule_file()));
}

partitioner::CostModel read_costs(const Config& config, at::Device device) {
  const std::string name = config.cost_model();
  if (name == "auto") return CostModel::of_device(device);
  if (const auto gpu = CostModel::of_gpu(name)) return *gpu;
  return partitioner::cost_model_from_json(core::read_file(name, "the cost model"), name);
}

partitioner::StepModel step_model(const Config& config, int ranks, int microbatches, int replicas) {
  const InFlight in_flight = in_flight_of(schedule_name(config));
  const bool configured = in_flight == InFlight::kAll || in_flight == InFlight::kActive;
  const bool splits = in_flight == InFlight::kSplitRanks || in_flight == InFlight::kSplitTwiceRanks;
  const bool twice = in_flight == InFlight::kTwiceRanks || in_flight == InFlight::kSplitTwiceRanks;
  return partitioner::StepModel(microbatches)
      .interleaved(in_flight != InFlight::kAll)
      .splits(splits)
      .active_microbatches(configured ? static_cast<int>(config.active_microbatches())
                                      : (twice ? 2 : 1) * ranks)
      .optimizer_state(config.optimizer_state_factor())
      .replicas(replicas)
      .shards(std::max(static_cast<int>(config.gradient_shards()) / replicas, 1))
      .sharding(sharding_of(config, replicas))
      .memory_limit(static_cast<int64_t>(config.memory_limit_mb() * (1 << 20)));
}

partitioner::PartitionOptions partition_options(const Config& config, int ranks,
                                                const partitioner::StepModel& step) {
  return partitioner::PartitionOptions(ranks)
      .step(step)
      .memory_weight(config.memory_weight())
      .auto_partition(config.auto_partition())
      .default_partition(static_cast<int>(config.default_partition()));
}

std::vector<int> best_placement(const Config& config, const std::string& file,
                                const graph::Graph& graph,
                                const partitioner::PartitionOptions& options) {
  const int ranks = options.partitions();
  const auto candidates = placements(config, file, ranks);
  if (candidates.size() == 1 || config.load_partition()) return candidates.front();
  std::vector<int> best;
  double shortest = std::numeric_limits<double>::infinity();
  for (const auto& placement : candidates) {
    try {
      const auto plan = partitioner::partition_in_best_order(
          graph, partitioner::PartitionOptions(options).placement(placement));
      const auto ordered = partitioner::reordered(graph, plan.order);
      const double makespan = StepPlanner(config, file, ordered, plan, ranks,
                                          options.step().in_order(plan.order), /*settled=*/false)
                                  .shortest();
      if (makespan >= shortest) continue;
      shortest = makespan;
      best = placement;
    } catch (const PartitionError&) {
      if (placement == candidates.front()) throw;  // the others need more stages
    }
  }
  return best;
}

PlannedStep plan_step(const Config& config, const std::string& file, const graph::Graph& graph,
                      const partitioner::Plan& plan, int ranks, const partitioner::StepModel& model,
                      bool settled) {
  return StepPlanner(config, file, graph, plan, ranks, model, settled).run();
}

}  // namespace smp::runtime
