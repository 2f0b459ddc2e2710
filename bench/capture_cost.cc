// SPDX-License-Identifier: Apache-2.0
// Costs of knowing a step function: its first capture, a capture on shapes, the guard, and the
// plan, for transformers of about 100, 1,000 and 10,000 operators. Medians, on one thread.
//
//     bazel run //bench:capture_cost

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "bench/gpt_step.h"
#include "bench/measure.h"
#include "partitioner/best_order.h"
#include "partitioner/cost.h"

namespace {

using smp::graph::Graph;

constexpr int kStages = 64;

/// The median of milliseconds.
double median(int rounds, const std::function<void()>& body) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) times.push_back(1e3 * bench::seconds(body));
  return bench::median(times);
}

void measure(int64_t layers) {
  const bench::GptStep subject(layers);
  const auto recorded = subject.trace(true, {}).recorded;
  Graph& graph = *recorded;
  smp::partitioner::estimate_costs(graph, nullptr);
  const auto operators = static_cast<double>(graph.operators.size());
  const int rounds = graph.operators.size() > 5000 ? 5 : 21;
  const double eager = median(rounds, [&] { subject.run(); });
  const double capture = median(rounds, [&] { subject.trace(true, {}); });
  const double shapes = median(rounds, [&] { subject.trace(false, {}); });
  const double guard = median(rounds, [&] { subject.trace(false, {&graph}); });
  const int stages = std::min<int>(kStages, static_cast<int>(layers));
  const double plan = median(rounds > 5 ? 5 : 3, [&] {
    smp::partitioner::partition_in_best_order(graph, smp::partitioner::PartitionOptions(stages));
  });
  std::printf("| %.0f | %.1f (%.1f) | %.1f (%.1f) | %.1f (%.1f) | %.2f (%.2f) | %d: %.1f |\n",
              operators, eager, 1e3 * eager / operators, capture, 1e3 * capture / operators, shapes,
              1e3 * shapes / operators, guard, 1e3 * guard / operators, stages, plan);
  std::fflush(stdout);
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  std::printf("ms (us per operator)\n");
  std::printf(
      "| operators | eager forward | first capture | on shapes | guard | plan: stages, ms |\n");
  std::printf("|---|---|---|---|---|---|\n");
  for (const int64_t layers : {4, 45, 455}) measure(layers);
  return 0;
}
