// SPDX-License-Identifier: Apache-2.0
// Costs of the pipeline engine itself for each action: two stages without operators, which send
// each other one tensor of 64 bytes and no gradient for each of many microbatches, on two ranks and
// on one. Microseconds of a step divided by the actions of a rank.
//
//     bazel run //bench:engine_overhead

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "comm/channel_pool.h"
#include "comm/threads/run_ranks.h"
#include "pipeline/executor.h"
#include "pipeline/generators.h"

namespace {

using namespace smp;

constexpr int kStages = 2, kMicrobatches = 64, kSteps = 201;

// One input that crosses from stage 0 to stage 1, and one, without a gradient, on which the
// backward starts: there is nothing to differentiate.
graph::Graph empty_graph() {
  graph::Graph graph;
  for (const char* name : {"0", "1"}) {
    graph::Value value;
    value.kind = graph::ValueKind::kInput;
    value.name = name;
    value.meta = graph::TensorMeta::of(at::zeros({16}));
    value.alias_set = graph.alias_sets++;
    graph.inputs.push_back(static_cast<graph::ValueId>(graph.values.size()));
    graph.values.push_back(value);
  }
  graph.roots.push_back({1, graph::kUndefined, {}});
  return graph;
}

pipeline::Edge edge() {
  pipeline::Edge edge;
  edge.to = 1;
  edge.values = {0};
  edge.gradients = {0};
  return edge;
}

void measure(int ranks, bool interleaved) {
  const graph::Graph graph = empty_graph();
  partitioner::Plan plan;
  plan.rank_of_stage = ranks == 1 ? std::vector<int>{0, 0} : std::vector<int>{0, 1};
  plan.stage_of_root = {1};
  const std::vector<pipeline::Edge> edges = {edge()};
  const auto stage_edges = pipeline::stage_edges(edges);
  const auto options = pipeline::ScheduleOptions(kStages, kMicrobatches)
                           .ranks(ranks)
                           .rank_of_stage(plan.rank_of_stage)
                           .edges(stage_edges)
                           .active_microbatches(kStages);
  const auto schedule = pipeline::lower(
      interleaved ? pipeline::interleaved(options) : pipeline::simple(options), stage_edges);
  std::vector<double> times;
  comm::run_ranks(ranks, [&](const comm::CommunicatorPtr& world) {
    const auto pool = std::make_shared<comm::ChannelPool>(world);
    const pipeline::PartitionedGraph partitioned(graph, plan, edges);
    const graph::TensorTable table;
    pipeline::GradientSums gradients;
    const pipeline::Executor::Setup setup{table, &gradients};
    pipeline::Executor executor(schedule, partitioned, setup, pool, /*ahead=*/2);
    pipeline::Executor::Step step;
    step.microbatches.assign(kMicrobatches, {{at::zeros({16}), at::zeros({16})}, {}, {}, {}});
    for (int i = 0; i < kSteps; ++i) {
      world->barrier();
      const auto start = std::chrono::steady_clock::now();
      executor.run(step);
      const auto end = std::chrono::steady_clock::now();
      if (world->rank() == 0) {
        times.push_back(std::chrono::duration<double, std::micro>(end - start).count());
      }
    }
  });
  std::sort(times.begin(), times.end());
  const auto actions = static_cast<double>(schedule.actions(0).size());
  std::printf("%d rank%s, %-11s: %.2f us an action (quartiles %.2f to %.2f)\n", ranks,
              ranks == 1 ? "" : "s", interleaved ? "interleaved" : "simple",
              times[kSteps / 2] / actions, times[kSteps / 4] / actions,
              times[3 * kSteps / 4] / actions);
}

}  // namespace

int main() {
  at::set_num_threads(1);
  for (const int ranks : {1, 2}) {
    for (const bool interleaved : {false, true}) measure(ranks, interleaved);
  }
  return 0;
}
