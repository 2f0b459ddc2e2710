// SPDX-License-Identifier: Apache-2.0
// The most that a rank allocates in a step is the amount predicted for its schedule.

#include <ATen/Parallel.h>

#include <mutex>

#include "graph/absent.h"
#include "graph/allocations.h"
#include "partitioner/predict.h"
#include "pipeline/generators.h"
#include "pipeline/simulator.h"
#include "runtime/runtime.h"
#include "runtime/step/pipeline_choice.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kRanks = 2, kMicrobatches = 8;
constexpr int64_t kBatch = 8, kLength = 32, kWidth = 64;

/// Layers whose activations are much larger than their parameters.
struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    for (int i = 0; i < 8; ++i) {
      layers.push_back(register_module(
          "layer" + std::to_string(i),
          torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})),
                                torch::nn::Linear(kWidth, 4 * kWidth), torch::nn::GELU(),
                                torch::nn::Dropout(0.1), torch::nn::Linear(4 * kWidth, kWidth))));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = x + layer->forward(x);
    return x;
  }
  std::vector<torch::nn::Sequential> layers;
};
TORCH_MODULE(Layers);

/// Peaks of each rank, in bytes.
struct Peaks {
  std::vector<double> measured = std::vector<double>(kRanks);
  std::vector<double> sums = std::vector<double>(kRanks);
  std::vector<double> predicted;  // without the sums
};

/// The peaks predicted of the program that runs: as `Program` does it.
std::vector<double> predicted_peaks(const runtime::Runtime& runtime) {
  const auto& config = runtime.config();
  const auto step = runtime::plan_step(
      config, runtime.first_step.schedule, *runtime.first_step.graph, *runtime.first_step.plan,
      kRanks, runtime::step_model(config, kRanks, kMicrobatches, /*replicas=*/1), false);
  return step.simulation.peak_memory;
}

Peaks peaks_of(const Config& config) {
  torch::manual_seed(5);
  const auto x = torch::randn({kMicrobatches * kBatch, kLength, kWidth});
  std::vector<Layers> nets;
  for (int i = 0; i < kRanks; ++i) nets.emplace_back();
  Peaks peaks;
  std::mutex mutex;
  run_as_threads(kRanks, config, [&] {
    DistributedModel<Layers> model(nets[rank()]);
    auto train = step([&](torch::Tensor input) {
      auto loss = model(input).square().mean();
      model->backward(loss);
      return loss;
    });
    train(x);  // captures
    train(x);
    // `.grad` stays, so a step allocates the sums of gradients and the memory kept for backwards.
    const graph::Allocations allocations;
    train(x);
    const std::lock_guard<std::mutex> lock(mutex);
    peaks.measured[rank()] = static_cast<double>(allocations.peak());
    for (const auto& parameter : nets[rank()]->parameters()) {
      if (!parameter.grad().defined() || graph::is_absent(parameter.grad())) continue;
      peaks.sums[rank()] += static_cast<double>(parameter.grad().nbytes());
    }
    if (rank() == 0) peaks.predicted = predicted_peaks(runtime::Runtime::get());
  });
  return peaks;
}

class Peak : public ::testing::TestWithParam<const char*> {};

TEST_P(Peak, IsPredictedWithinATenth) {
  at::set_num_threads(1);
  const auto peaks = peaks_of(Config()
                                  .partitions(kRanks)
                                  .microbatches(kMicrobatches)
                                  .pipeline(GetParam())
                                  .seed(3)
                                  .trace_memory_usage(true));
  for (int rank = 0; rank < kRanks; ++rank) {
    const double predicted = peaks.predicted[rank] + peaks.sums[rank];
    EXPECT_NEAR(peaks.measured[rank] / predicted, 1, 0.1)
        << "rank " << rank << ": " << peaks.measured[rank] << " bytes measured, " << predicted
        << " predicted";
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, Peak,
                         ::testing::Values("simple", "interleaved", "1f1b", "eager_1f1b",
                                           "interleaved_1f1b", "breadth_first", "zb_h1"));

/// The plan has room for all that the list keeps, in microbatches of one stage. A `list` is made
/// for the room that the plan leaves.
TEST(PredictedInFlight, IsAtLeastWhatTheListKeeps) {
  for (const auto& kind : pipeline::schedule_kinds()) {
    for (int ranks = 2; kind.trains && kind.name != "list" && ranks <= 5; ++ranks) {
      for (const int microbatches : {1, 2, 3, 5, 8, 13}) {
        SCOPED_TRACE(c10::str(kind.name, ", ", ranks, " ranks, ", microbatches, " microbatches"));
        auto options = kind.place(ranks, /*per_rank=*/0, microbatches);
        const auto model = runtime::step_model(Config().partitions(ranks).pipeline(kind.name),
                                               ranks, microbatches, /*replicas=*/1);
        options.active_microbatches(model.active_microbatches());
        auto costs = pipeline::StageCosts::uniform(options.stages());
        costs.kept.assign(options.stages(), 1);
        const auto schedule = pipeline::lower(kind.generate(options), options.edges());
        const auto kept = pipeline::simulate(schedule, options.edges(), costs).peak_memory;
        std::vector<double> predicted(ranks, 0);
        for (int stage = 0; stage < options.stages(); ++stage) {
          predicted[options.rank_of_stage()[stage]] +=
              partitioner::microbatches_in_flight(model, /*trains=*/true, stage, options.stages());
        }
        for (int rank = 0; rank < ranks; ++rank) EXPECT_GE(predicted[rank], kept[rank]) << rank;
        const bool is_exact = kind.name == "simple" || kind.name == "interleaved";
        if (is_exact) {
          EXPECT_EQ(predicted, kept);
        }
      }
    }
  }
}

/// Sixteen weights of 256 KiB, and next to no activations.
TEST(PeakOfGradients, IsLittleAboveTheSums) {
  at::set_num_threads(1);
  constexpr int64_t kCount = 16, kWide = 256, kBytes = kWide * kWide * 4;
  for (const char* pipeline : {"simple", "interleaved", "zb_h1"}) {
    torch::nn::Sequential net;
    for (int i = 0; i < kCount; ++i) {
      net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWide, kWide).bias(false)));
    }
    run_as_threads(1, Config().microbatches(2).pipeline(pipeline), [&] {
      DistributedModel<torch::nn::Sequential> model(net);
      auto train = step([&](torch::Tensor input) {
        auto loss = model(input).square().mean();
        model->backward(loss);
        return loss;
      });
      const auto x = torch::ones({2, kWide});
      for (int i = 0; i < 2; ++i) train(x);
      const graph::Allocations allocations;
      train(x);
      EXPECT_LT(allocations.peak(), (kCount + 4) * kBytes)
          << pipeline << ": the sums, to which each gradient goes on at once";
    });
  }
}

}  // namespace
}  // namespace smp::testing
