// SPDX-License-Identifier: Apache-2.0
// Every schedule that a step takes is held against the bytes that the plan leaves.

#include <algorithm>
#include <optional>

#include "partitioner/best_order.h"
#include "partitioner/order.h"
#include "partitioner/predict.h"
#include "pipeline/generators.h"
#include "runtime/step/pipeline_choice.h"
#include "tests/partitioner/graph_builder.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kStepMicrobatches = 6;
constexpr double kBytesOfMiB = 1 << 20;

/// Products in a row, which save their inputs of 32 bytes. The gradient of each result is as large,
/// and stays there between the halves of a split backward.
graph::Graph products(int count) {
  partitioner::testing::GraphBuilder b;
  auto x = b.input(at::ones({2, 4}));
  for (int i = 0; i < count; ++i) {
    x = b.op("aten::matmul", {x, b.parameter("w" + std::to_string(i), at::ones({4, 4}))});
    b.cost(10, 20, /*saved_bytes=*/32);
  }
  x = b.op("aten::mean", {x, c10::IValue()});
  b.backward(x);
  b.output(x);
  return std::move(b.graph());
}

/// A plan, and the memory of a rank that the partitioner predicts for it.
struct Planned {
  graph::Graph graph;
  partitioner::Plan plan;
  partitioner::StepModel model;
  int64_t most = 0;
};

Planned planned(const Config& config, int ranks, const std::string& file = "") {
  const auto graph = products(12);
  const auto model = runtime::step_model(config, ranks, kStepMicrobatches, /*replicas=*/1);
  auto options = runtime::partition_options(config, ranks, model);
  options.placement(runtime::best_placement(config, file, graph, options));
  auto plan = partitioner::partition_in_best_order(graph, options);
  auto ordered = partitioner::reordered(graph, plan.order);
  const auto memory = partitioner::predict(ordered, plan, model).rank_memory;
  return {std::move(ordered), std::move(plan), model,
          *std::max_element(memory.begin(), memory.end())};
}

/// The step under a limit of so many bytes, with the plan as it is without one.
runtime::PlannedStep step_within(Config config, const Planned& planned, int ranks, int64_t bytes,
                                 const std::string& file = "") {
  config.memory_limit_mb(static_cast<double>(bytes) / kBytesOfMiB);
  const auto model = runtime::step_model(config, ranks, kStepMicrobatches, /*replicas=*/1);
  EXPECT_EQ(model.memory_limit(), bytes);
  return runtime::plan_step(config, file, planned.graph, planned.plan, ranks, model, false);
}

/// The bytes that ranks need under the schedule. The partitioner assumes microbatches in flight;
/// here the list tells what it keeps.
int64_t needed(const runtime::PlannedStep& step, const partitioner::Plan& plan) {
  std::vector<double> bytes(step.prediction.rank_memory.begin(), step.prediction.rank_memory.end());
  for (int s = 0; s < plan.stages(); ++s) {
    bytes[plan.rank_of_stage[s]] -= static_cast<double>(step.prediction.stages[s].activations);
  }
  for (size_t r = 0; r < bytes.size(); ++r) bytes[r] += step.simulation.peak_memory[r];
  return static_cast<int64_t>(*std::max_element(bytes.begin(), bytes.end()));
}

Config config_for(const std::string& pipeline, int ranks) {
  return Config().partitions(ranks).microbatches(kStepMicrobatches).pipeline(pipeline);
}

/// A step takes a schedule exactly where its bytes are there.
TEST(ScheduleMemory, IsProvedForEverySchedule) {
  int above_the_plan = 0;
  for (const auto& kind : pipeline::schedule_kinds()) {
    // A list is made for the limit.
    for (int ranks = 2; kind.trains && kind.name != "list" && ranks <= 4; ++ranks) {
      SCOPED_TRACE(c10::str(kind.name, ", ", ranks, " ranks"));
      Config config = config_for(kind.name, ranks);
      if (kind.placement != pipeline::Placement::kAny &&
          kind.placement != pipeline::Placement::kOnePerRank) {
        config.virtual_stages(2);
      }
      const Planned plan = planned(config, ranks);
      const int64_t bytes = needed(step_within(config, plan, ranks, 1 << 20), plan.plan);
      above_the_plan += bytes > plan.most;
      if (!kind.splits) EXPECT_LE(bytes, plan.most) << "the plan has room for it";
      EXPECT_EQ(error_or_none([&] { step_within(config, plan, ranks, bytes); }), "");
      const std::string error = error_or_none([&] { step_within(config, plan, ranks, bytes - 1); });
      EXPECT_NE(error.find(": makes the rank keep "), std::string::npos) << error;
      EXPECT_THROW(step_within(config, plan, ranks, bytes - 1), PartitionError);
    }
  }
  EXPECT_GT(above_the_plan, 0) << "split backwards keep gradients, too";
}

TEST(ScheduleMemory, IsProvedForFiles) {
  const pipeline::ScheduleOptions options(2, kStepMicrobatches);
  const auto schedule = pipeline::make_schedule("zb_h2", options);
  const std::string file = pipeline::to_string(schedule);
  Config config = config_for("file", 2).schedule_file("own.txt");
  const Planned plan = planned(config, 2, file);
  const int64_t bytes = needed(step_within(config, plan, 2, 1 << 20, file), plan.plan);
  EXPECT_EQ(error_or_none([&] { step_within(config, plan, 2, bytes, file); }), "");
  EXPECT_EQ(error_or_none([&] { step_within(config, plan, 2, bytes - 32, file); }),
            "[smp] schedule: rank 1 at action 10 (1I2): makes the rank keep 1184, memory_limit "
            "allows 1152. Run a backward first, or raise memory_limit.");
}

}  // namespace
}  // namespace smp::testing
