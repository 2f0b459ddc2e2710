// SPDX-License-Identifier: Apache-2.0
// smp_plan: plans a model from its saved graph, or draws a schedule, without running it.

#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/json.h"
#include "core/schema.h"
#include "graph/serialize.h"
#include "partitioner/best_order.h"
#include "partitioner/order.h"
#include "partitioner/plan_file.h"
#include "smp/config.h"
#include "tools/forecast.h"
#include "tools/plan_page.h"
#include "tools/plan_text.h"
#include "tools/program.h"
#include "tools/schedule_view.h"

namespace smp::tools {
namespace {

struct Options {
  std::string graph;
  std::string schedule;
  std::string config;
  std::string format = "text";
  std::string output;
  std::string load_plan;
  std::string save_plan;
  std::string title;
  std::vector<int> compare;
  int replicas = 1;
};

/// The parameters of a run, of which the command line sets some: those win over the file.
class Parameters {
 public:
  explicit Parameters(CLI::App& app) {
    add(app, "--stages,--partitions", "partitions", "Number of partitions");
    add(app, "--microbatches", "microbatches", "Microbatches of a step");
    add(app, "--pipeline", "pipeline", "simple, interleaved, 1f1b, zb_h1, ... (docs/schedules.md)");
    add(app, "--virtual-stages", "virtual_stages", "Stages of each partition; 0: as needed");
    add(app, "--active", "active_microbatches", "Microbatches in flight at most (interleaved)");
    add(app, "--memory-weight", "memory_weight", "0 balances time only, 1 memory only");
    add(app, "--memory-limit", "memory_limit_mb", "MiB that a partition may use; 0: any");
    add(app, "--optimizer-state", "optimizer_state_factor",
        "Bytes of optimizer state for each byte trained: 2 (Adam), 1 (momentum), 0; else the "
        "optimizer's of the run");
  }

  Config over(const std::string& file) const {
    Config config;
    if (!file.empty()) {
      const Config from_file = Config::from_file(file);
      from_file.validate();
      for (const core::Parameter& parameter : core::schema()) {
        if (from_file.is_set(parameter.name)) {
          config.set(parameter.name, from_file.get(parameter.name));
        }
      }
    }
    for (const Setting& setting : settings_) {
      if (setting.option->count() > 0) config.set(setting.parameter, value(setting));
    }
    config.validate();
    return config;
  }

 private:
  struct Setting {
    std::string parameter;
    CLI::Option* option;
  };

  void add(CLI::App& app, const char* names, const char* parameter, const std::string& help) {
    settings_.push_back({parameter, app.add_option(names, help)});
  }

  static ConfigValue value(const Setting& setting) {
    switch (core::find_parameter(setting.parameter)->type) {
      case core::ParameterType::kInt:
        return setting.option->as<int64_t>();
      case core::ParameterType::kNumber:
        return setting.option->as<double>();
      default:
        return setting.option->as<std::string>();
    }
  }

  std::vector<Setting> settings_;
};

void write(const std::string& text, const std::string& path) {
  if (path.empty()) {
    std::cout << text << std::flush;
  } else {
    core::write_file(path, text, "cannot be written");
  }
}

/// The configuration with the microbatches that a rank runs: with tensor parallelism those of its
/// group, unless that is given one batch.
Config of_a_rank(Config config) {
  const int64_t batches = config.prescaled_batch() ? 1 : config.tensor_parallel_degree();
  return config.microbatches(config.microbatches() * batches);
}

/// The plan of the file, or else the partitioner's.
partitioner::Plan make_plan(const Options& options, const graph::Graph& graph,
                            const partitioner::PartitionOptions& partition) {
  if (options.load_plan.empty()) {
    return partitioner::partition_in_best_order(graph, partition);
  }
  return partitioner::plan_from_json(graph, core::read_file(options.load_plan, "the plan"),
                                     partition.partitions(), options.load_plan);
}

std::string planned(const Options& options, const graph::SavedGraph& saved, const Config& config) {
  const graph::Graph& graph = saved.graph;
  SMP_CHECK_WITH(ConfigError, options.compare.empty() || options.format != "html",
                 "smp_plan: --compare has no page: expected --format text or json, got html.");
  if (!options.compare.empty()) {
    const auto alternatives = plan_alternatives(saved, config, options.compare, options.replicas);
    return options.format == "json" ? to_json(graph, alternatives).dump(2) + "\n"
                                    : to_text(graph, alternatives);
  }
  const auto ranks = static_cast<int>(config.partitions());
  const auto microbatches = static_cast<int>(config.microbatches());
  auto partition = runtime::partition_options(
      config, ranks, step_model(config, saved, ranks, microbatches, options.replicas));
  const std::string file = runtime::read_schedule(config);
  partition.placement(runtime::best_placement(config, file, graph, partition));
  auto plan = make_plan(options, graph, partition);
  const auto ordered = partitioner::reordered(graph, plan.order);
  const Forecast predicted =
      forecast(config, file, ordered, std::move(plan), ranks, partition.step());
  if (!options.save_plan.empty()) {
    write(partitioner::plan_to_json(graph, predicted.plan), options.save_plan);
  }
  if (options.format == "json") return to_json(ordered, predicted).dump(2) + "\n";
  if (options.format == "html") return to_html(ordered, predicted, options.title);
  return to_text(ordered, predicted);
}

std::string shown(const Options& options, const Config& config) {
  SMP_CHECK_WITH(ConfigError, options.graph.empty() != options.schedule.empty(),
                 "smp_plan: expected a graph to plan or a --schedule to draw, got ",
                 options.graph.empty() ? "neither" : "both", ".");
  return options.graph.empty()
             ? show_schedule(options.schedule, config, options.format)
             : planned(options, graph::load_graph(options.graph), of_a_rank(config));
}

}  // namespace
}  // namespace smp::tools

int main(int argc, char** argv) {
  using namespace smp::tools;  // NOLINT(google-build-using-namespace)
  Options options;
  CLI::App app{
      "Plans a model from its saved graph, without running it: smp_plan GRAPH [OPTIONS]\n"
      "Draws a schedule: smp_plan --schedule NAME [OPTIONS]\n"
      "See docs/partitioning.md and docs/performance.md.",
      "smp_plan"};
  add_version(app);
  app.add_option("graph", options.graph, "The file that a run wrote for \"graph_file\"");
  app.add_option("--schedule", options.schedule,
                 "A schedule to draw instead: a name as for --pipeline, or a file");
  app.add_option("--config", options.config, "JSON file with the parameters of the run to plan");
  const Parameters parameters(app);
  app.add_option("--format", options.format, "text, json or html")
      ->check(CLI::IsMember({"text", "json", "html"}))
      ->capture_default_str();
  app.add_option("--output", options.output, "File to write instead of the standard output");
  app.add_option("--title", options.title, "Heading of the page; else the graph's file");
  auto* compare = app.add_option("--compare", options.compare, "Numbers of partitions: 1,2,4,8")
                      ->delimiter(',')
                      ->check(CLI::PositiveNumber);
  app.add_option("--replicas", options.replicas,
                 "Data-parallel replicas, which divide state with \"shard_optimizer_state\"")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--save-plan", options.save_plan, "File for the plan, for \"partition_file\"")
      ->excludes(compare);
  app.add_option("--load-plan", options.load_plan,
                 "Predict the step of a plan that was saved, and perhaps edited")
      ->excludes(compare);
  CLI11_PARSE(app, argc, argv);
  if (options.title.empty()) options.title = std::filesystem::path(options.graph).stem().string();
  return status_of([&] {
    const smp::Config config = parameters.over(options.config);
    write(shown(options, config), options.output);
    return 0;
  });
}
