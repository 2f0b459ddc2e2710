// SPDX-License-Identifier: Apache-2.0
// Bounds of a rank's memory: by the microbatches in flight, and by the sums of gradients.

#include <ATen/Parallel.h>

#include "graph/allocations.h"
#include "partitioner/predict.h"
#include "pipeline/generators.h"
#include "pipeline/simulator.h"
#include "runtime/step/pipeline_choice.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

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
