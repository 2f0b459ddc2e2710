// SPDX-License-Identifier: Apache-2.0
// Costs of a long life: memory, descriptors and threads over many batch shapes, many steps and many
// stages, ranks being threads of this process; and where the time of a new graph goes.
//
//     bazel run //bench:growth

#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/gpt_step.h"
#include "bench/measure.h"
#include "examples/gpt/gpt_model.h"
#include "partitioner/best_order.h"
#include "partitioner/cost.h"
#include "partitioner/order.h"
#include "pipeline/stage.h"
#include "runtime/step/pipeline_choice.h"
#include "smp/smp.h"

namespace {

using bench::median;
using smp::graph::Graph;

constexpr int64_t kSequence = 16;

/// Seconds of the processor, by all threads: other programs do not count.
double seconds(const std::function<void()>& body) {
  const std::clock_t start = std::clock();
  body();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

int64_t entries(const char* folder) {
  const std::filesystem::directory_iterator all(folder);
  return std::distance(begin(all), end(all));
}

/// The resources of this process.
struct Usage {
  double resident_mib;
  int64_t descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");

  Usage() {
    constexpr double kPagesInMib = 256;
    int64_t all = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> all >> resident;
    resident_mib = static_cast<double>(resident) / kPagesInMib;
  }
};

void print_row(const std::string& what, int ranks, const std::vector<Usage>& usages,
               const std::vector<double>& times) {
  std::printf("| %s | %d |", what.c_str(), ranks);
  for (const Usage& usage : usages) {
    std::printf(" %.0f, %ld, %ld |", usage.resident_mib, usage.descriptors, usage.threads);
  }
  std::printf(" %.1f | %.1f |\n", 1e3 * times.front(), 1e3 * median(times));
  std::fflush(stdout);
}

/// Trains a GPT of `layers` on `ranks` for `steps`, each on a batch of `batch(step)` samples, and
/// looks at the process in the first, the middle and the last one.
void live(const std::string& what, int ranks, int64_t layers, int steps,
          const std::function<int64_t(int)>& batch) {
  const auto config = smp::Config().partitions(ranks).microbatches(2);
  std::vector<Usage> usages;
  std::vector<double> times;
  smp::run_as_threads(ranks, config, [&] {
    gpt::GPT net(gpt::GPTOptions().layers(layers).width(64).heads(2).sequence(kSequence));
    smp::DistributedModel<gpt::GPT> model(net);
    smp::DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.01);
    auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
      const auto loss = torch::nn::functional::cross_entropy(net(x).flatten(0, 1), y.flatten());
      model->backward(loss);
      return loss;
    });
    for (int step = 0; step < steps; ++step) {
      const auto x = torch::full({batch(step), kSequence}, step % 256, torch::kLong);
      const double time = seconds([&] {
        optimizer.zero_grad();
        train(x, x);
        optimizer.step();
        smp::barrier();
      });
      if (smp::rank() == 0) times.push_back(time);
      const bool looks = step == 0 || step == steps / 2 || step == steps - 1;
      if (looks && smp::rank() == 0) usages.emplace_back();
      smp::barrier();
    }
  });
  print_row(what, ranks, usages, times);
}

/// Each block a region of activation checkpointing, for `pipeline::Stage`.
std::vector<int> blocks_of(const Graph& graph) {
  std::map<std::string, int> number;
  std::vector<int> regions;
  for (const auto& op : graph.operators) {
    const std::string block = op.scope.substr(0, op.scope.find('.', std::string("blocks.").size()));
    const bool inside = block.rfind("blocks.", 0) == 0;
    regions.push_back(inside ? number.emplace(block, number.size()).first->second : -1);
  }
  return regions;
}

void print_phase(const char* phase, size_t operators, double time) {
  std::printf("| %s | %.1f | %.2f |\n", phase, 1e3 * time,
              1e6 * time / static_cast<double>(operators));
  std::fflush(stdout);
}

/// The phases of a new graph of so many layers on `stages` ranks, of which each makes a program of
/// its own stage.
void phases(int64_t layers, int stages) {
  constexpr int kMicrobatches = 8;
  const bench::GptStep subject(layers);
  std::shared_ptr<const Graph> graph;
  const double first = seconds([&] { graph = subject.trace(true, {}).recorded; });
  const size_t operators = graph->operators.size();
  std::printf("\n%zu operators, %d stages\n\n| phase | ms | us per operator |\n|---|---|---|\n",
              operators, stages);
  print_phase("capture, on data", operators, first);
  std::shared_ptr<Graph> recorded;
  print_phase("capture, on shapes", operators,
              seconds([&] { recorded = subject.trace(false, {}).recorded; }));
  print_phase("guard", operators, seconds([&] { subject.trace(false, {graph.get()}); }));
  smp::partitioner::estimate_costs(*recorded, nullptr);
  const auto config = smp::Config().partitions(stages).microbatches(kMicrobatches);
  smp::partitioner::Plan plan;
  const auto model = smp::runtime::step_model(config, stages, kMicrobatches, /*replicas=*/1);
  print_phase("plan", operators, seconds([&] {
                plan = smp::partitioner::partition_in_best_order(
                    *recorded, smp::runtime::partition_options(config, stages, model));
              }));
  const Graph ordered = smp::partitioner::reordered(*recorded, plan.order);
  std::optional<smp::runtime::PlannedStep> step;
  print_phase("schedule", operators, seconds([&] {
                step = smp::runtime::plan_step(config, "", ordered, plan, stages, model, true);
              }));
  const std::vector<int> blocks = blocks_of(ordered);
  std::optional<smp::pipeline::PartitionedGraph> partitioned;
  print_phase("facts, of all stages", operators,
              seconds([&] { partitioned.emplace(ordered, plan, step->edges); }));
  std::vector<double> plain, checkpointed;
  for (int index = 0; index < stages; ++index) {
    std::optional<smp::pipeline::Stage> stage;
    plain.push_back(
        seconds([&] { stage.emplace(*partitioned, index, kMicrobatches, subject.table()); }));
    checkpointed.push_back(seconds(
        [&] { stage.emplace(*partitioned, index, kMicrobatches, subject.table(), blocks); }));
  }
  print_phase("program, of one stage", operators, median(plain));
  print_phase("the same, its blocks checkpointed", operators, median(checkpointed));
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  std::printf(
      "Resident MiB, descriptors and threads of the process in the first, the middle and the last "
      "step; ms of the processor for all ranks\n\n");
  std::printf("| | ranks | first | middle | last | first step | median step |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  const auto other = [](int step) { return 2 * (100 - step); };  // the first is the largest
  const auto same = [](int) { return 4; };
  live("100 batch shapes", 1, 4, 100, other);
  live("100 batch shapes", 4, 4, 100, other);
  live("5,000 steps", 2, 2, 5000, same);
  live("64 stages", 64, 64, 5, same);
  phases(64, 2);
  phases(444, 2);
  phases(444, 64);
  return 0;
}
