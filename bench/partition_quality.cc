// SPDX-License-Identifier: Apache-2.0
// The automatic partition against two splits by hand that people use: equally many layers on each
// rank, and equally many parameters. Two ranks, as threads with one intra-op thread each; the three
// ways take turns, and the table shows medians over the rounds and their ratios.
//
//     bazel run //bench:partition_quality

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#include "bench/measure.h"
#include "bench/partition_models.h"
#include "smp/smp.h"

namespace {

using bench::median;
using bench::Model;

constexpr int kRanks = 2, kRounds = 9, kSteps = 6;
constexpr int64_t kMicrobatches = 4, kBatch = 32;

using Partitions = std::vector<int>;  // partition of each layer; empty: automatic

Partitions equal_layers(const Model& model) {
  Partitions result;
  const auto count = static_cast<int>(model.layers.size());
  for (int i = 0; i < count; ++i) result.push_back(i * kRanks / count);
  return result;
}

/// Cuts where the parameters before the cut come closest to half of all.
Partitions equal_parameters(const Model& model) {
  std::vector<int64_t> before{0};
  for (const auto& layer : model.layers) {
    int64_t count = 0;
    for (const auto& parameter : layer->parameters()) count += parameter.numel();
    before.push_back(before.back() + count);
  }
  const auto off = [&](size_t cut) { return std::abs(2 * before[cut] - before.back()); };
  size_t best = 1;
  for (size_t cut = 2; cut + 1 < before.size(); ++cut) {
    if (off(cut) < off(best)) best = cut;
  }
  Partitions result(model.layers.size(), 1);
  std::fill_n(result.begin(), best, 0);
  return result;
}

smp::Config config(const Partitions& partitions) {
  smp::Config config;
  config.partitions(kRanks).microbatches(kMicrobatches).memory_weight(0);
  if (!partitions.empty()) config.auto_partition(false).default_partition(0);
  return config;
}

/// Milliseconds of the fastest of some training steps, after two to warm up.
double measure(const std::function<std::shared_ptr<Model>()>& make, bool automatic,
               Partitions (*split)(const Model&)) {
  torch::manual_seed(1);
  const auto prototype = make();
  const auto x = prototype->inputs(kBatch), y = prototype->targets(kBatch);
  const Partitions partitions = automatic ? Partitions() : split(*prototype);
  std::vector<std::shared_ptr<Model>> nets;
  for (int rank = 0; rank < kRanks; ++rank) nets.push_back(make());
  double best = 1e30;
  smp::run_as_threads(kRanks, config(partitions), [&] {
    torch::set_num_threads(1);
    auto net = nets[smp::rank()];
    for (size_t i = 0; i < partitions.size(); ++i) {
      if (!net->layers[i]->parameters().empty()) smp::set_partition(net->layers[i], partitions[i]);
    }
    smp::DistributedModel<std::shared_ptr<Model>> model(net);
    smp::DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.01);
    auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = net->loss(x, y);
      model->backward(loss);
      return loss;
    });
    for (int step = 0; step < kSteps + 2; ++step) {
      smp::barrier();
      const auto start = std::chrono::steady_clock::now();
      optimizer.zero_grad();
      train(x, y);
      optimizer.step();
      smp::barrier();
      const auto end = std::chrono::steady_clock::now();
      const double ms = std::chrono::duration<double, std::milli>(end - start).count();
      if (smp::rank() == 0 && step >= 2) best = std::min(best, ms);
    }
  });
  return best;
}

template <class M>
void compare(const char* name) {
  const auto make = [] { return std::static_pointer_cast<Model>(std::make_shared<M>()); };
  std::vector<double> automatic, layers, parameters, over_layers, over_parameters;
  for (int round = 0; round < kRounds; ++round) {
    automatic.push_back(measure(make, true, nullptr));
    layers.push_back(measure(make, false, &equal_layers));
    parameters.push_back(measure(make, false, &equal_parameters));
    over_layers.push_back(layers.back() / automatic.back());
    over_parameters.push_back(parameters.back() / automatic.back());
  }
  std::printf("| %s | %.1f | %.1f (%.2f) | %.1f (%.2f) |\n", name, median(automatic),
              median(layers), median(over_layers), median(parameters), median(over_parameters));
  std::fflush(stdout);
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  std::printf("ms a step (how many times the automatic partition's)\n");
  std::printf("| model | automatic | equal layers | equal parameters |\n|---|---|---|---|\n");
  compare<bench::LargeVocabulary>("large vocabulary");
  compare<bench::ResNet>("ResNet");
  compare<bench::UNet>("U-Net");
  return 0;
}
