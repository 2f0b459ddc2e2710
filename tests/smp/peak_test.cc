// SPDX-License-Identifier: Apache-2.0
// The most that a rank allocates in a step is the amount predicted for its schedule.

#include <ATen/Parallel.h>

#include <functional>
#include <mutex>
#include <optional>

#include "graph/absent.h"
#include "graph/allocations.h"
#include "partitioner/predict.h"
#include "pipeline/generators.h"
#include "pipeline/simulator.h"
#include "runtime/runtime.h"
#include "runtime/step/pipeline_choice.h"
#include "smp/autocast.h"
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
  std::vector<double> predicted = {};  // without the sums
};

/// The peaks predicted of the program that runs: as `Program` does it.
std::vector<double> predicted_peaks(const runtime::Runtime& runtime) {
  const auto& config = runtime.config();
  const auto step = runtime::plan_step(
      config, runtime.first_step.schedule, *runtime.first_step.graph, *runtime.first_step.plan,
      kRanks, runtime::step_model(config, kRanks, kMicrobatches, /*replicas=*/1), false);
  auto peaks = step.simulation.peak_memory;
  for (size_t stage = 0; stage < step.prediction.stages.size(); ++stage) {
    peaks[runtime.first_step.plan->rank_of_stage[stage]] +=
        static_cast<double>(step.prediction.stages[stage].casts);
  }
  return peaks;
}

/// `forward` is called with each rank's net and a microbatch of `x`.
template <class Net>
Peaks peaks_of(const Config& config, const torch::Tensor& x,
               const std::function<torch::Tensor(Net& net, const torch::Tensor&)>& forward) {
  at::set_num_threads(1);
  torch::manual_seed(5);
  std::vector<Net> nets;
  for (int i = 0; i < kRanks; ++i) nets.emplace_back();
  Peaks peaks;
  std::mutex mutex;
  run_as_threads(kRanks, config, [&] {
    Net& net = nets[rank()];
    DistributedModel<Net> model(net);
    auto train = step([&](torch::Tensor input) {
      auto loss = forward(net, input).square().mean();
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
    for (const auto& parameter : net->parameters()) {
      if (!parameter.grad().defined() || graph::is_absent(parameter.grad())) continue;
      peaks.sums[rank()] += static_cast<double>(parameter.grad().nbytes());
    }
    if (rank() == 0) peaks.predicted = predicted_peaks(runtime::Runtime::get());
  });
  return peaks;
}

void expect_predicted(const Peaks& peaks) {
  for (int rank = 0; rank < kRanks; ++rank) {
    const double predicted = peaks.predicted[rank] + peaks.sums[rank];
    EXPECT_NEAR(peaks.measured[rank] / predicted, 1, 0.1)
        << "rank " << rank << ": " << peaks.measured[rank] << " bytes measured, " << predicted
        << " predicted";
  }
}

Config config_of(const char* pipeline) {
  return Config().partitions(kRanks).microbatches(kMicrobatches).pipeline(pipeline).seed(3);
}

class Peak : public ::testing::TestWithParam<const char*> {};

TEST_P(Peak, IsPredictedWithinATenth) {
  torch::manual_seed(5);
  expect_predicted(
      peaks_of<Layers>(config_of(GetParam()).trace_memory_usage(true),
                       torch::randn({kMicrobatches * kBatch, kLength, kWidth}),
                       [](Layers& net, const torch::Tensor& x) { return net->forward(x); }));
}

/// Without a bias, or with more than two dimensions, a layer multiplies by a view of its weight.
template <int kLayers, int64_t kSize, bool kBias>
struct LinearsImpl : torch::nn::Module {
  LinearsImpl() {
    for (int i = 0; i < kLayers; ++i) {
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(kSize, kSize).bias(kBias)));
    }
    register_module("layers", layers);
  }
  torch::nn::Sequential layers;
};

template <class Net>
void expect_predicted(const char* pipeline, bool traces, bool casts, const torch::Tensor& x) {
  SCOPED_TRACE(c10::str(x.sizes(), casts ? ", autocast" : "",
                        traces ? ", measured memory" : ", estimated memory"));
  expect_predicted(peaks_of<Net>(config_of(pipeline).trace_memory_usage(traces), x,
                                 [&](Net& net, const torch::Tensor& input) {
                                   std::optional<amp::Autocast> autocast;
                                   if (casts) autocast.emplace(torch::kBFloat16);
                                   return net->layers->forward(input);
                                 }));
}

/// Weights that are much larger than the activations, or much smaller.
template <bool kBias>
using Wide = torch::nn::ModuleHolder<LinearsImpl<40, 256, kBias>>;
template <bool kBias>
using Narrow = torch::nn::ModuleHolder<LinearsImpl<80, 32, kBias>>;

/// The casts of weights are there once, however many microbatches are in flight.
class PeakUnderAutocast : public Peak {};

TEST_P(PeakUnderAutocast, IsPredictedWithinATenth) {
  for (const bool traces : {false, true}) {
    expect_predicted<Wide<false>>(GetParam(), traces, /*casts=*/true,
                                  torch::ones({kMicrobatches * 2, 256}));
  }
}

/// Between the halves of its backward a microbatch keeps storages, of which values are views.
class PeakOfHalves : public Peak {};

TEST_P(PeakOfHalves, IsPredictedForWideLayers) {
  for (const auto& x :
       {torch::ones({kMicrobatches * 2, 256}), torch::ones({kMicrobatches, 2, 256})}) {
    for (const bool traces : {false, true}) {
      for (const bool casts : {false, true}) {
        expect_predicted<Wide<false>>(GetParam(), traces, casts, x);
        expect_predicted<Wide<true>>(GetParam(), traces, casts, x);
      }
    }
  }
}

/// Estimates leave out what autocast casts for each microbatch: inputs, and small weights.
TEST_P(PeakOfHalves, IsPredictedForNarrowLayers) {
  for (const auto& x :
       {torch::ones({kMicrobatches * 512, 32}), torch::ones({kMicrobatches, 512, 32})}) {
    for (const bool casts : {false, true}) {
      expect_predicted<Narrow<false>>(GetParam(), /*traces=*/casts, casts, x);
      expect_predicted<Narrow<true>>(GetParam(), /*traces=*/casts, casts, x);
    }
  }
}

/// One layer with an operator of its own that a backward divides, or does not (batch norm).
struct OthersImpl : torch::nn::Module {
  OthersImpl() {
    for (const char* name : {"factor", "divisor", "term", "token"}) {
      register_parameter(name, torch::rand({kSize}) + 0.5);
    }
    weight = register_parameter("weight", 0.1 * torch::randn({kSize, kSize}));
    register_module("norm", norm);
    register_module("embedding", embedding);
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto parameters = named_parameters(/*recurse=*/false);
    const int64_t rows = x.size(0);
    x = torch::tanh(x * parameters["factor"]);
    x = torch::tanh(x / parameters["divisor"]);
    x = torch::tanh(parameters["term"] - x);
    x = torch::tanh(torch::where(x.detach() > 0, x, parameters["token"]));
    x = torch::tanh(torch::cat({parameters["token"].expand({rows, kSize}), x}, 1));
    x = torch::tanh(norm(x.narrow(1, kSize, kSize)));
    x = torch::tanh(x + embedding(torch::arange(rows) % kRows));
    x = torch::tanh(torch::rms_norm(x, {kSize}, parameters["factor"]));
    // A weight that is computed: its second half is all its own.
    return x + torch::linear(x, weight * torch::sigmoid(weight));
  }

  static constexpr int64_t kSize = 32, kRows = 64;
  torch::Tensor weight;
  torch::nn::BatchNorm1d norm{kSize};
  torch::nn::Embedding embedding = torch::nn::Embedding(kRows, kSize);
};
TORCH_MODULE(Others);

struct OtherOperatorsImpl : torch::nn::Module {
  OtherOperatorsImpl() {
    for (int i = 0; i < 8; ++i) layers->push_back(Others());
    register_module("layers", layers);
  }
  torch::nn::Sequential layers;
};
TORCH_MODULE(OtherOperators);

TEST_P(PeakOfHalves, IsPredictedForOtherOperators) {
  torch::manual_seed(5);
  expect_predicted<OtherOperators>(GetParam(), /*traces=*/true, /*casts=*/false,
                                   torch::randn({kMicrobatches * 1024, OthersImpl::kSize}));
}

/// Each is one operator, made of products with the weights that a backward divides.
struct RecurrentNetImpl : torch::nn::Module {
  RecurrentNetImpl() {
    for (int i = 0; i < 4; ++i) {
      grus.push_back(register_module(c10::str("gru", i), torch::nn::GRU(kSize, kSize)));
      rnns.push_back(register_module(c10::str("rnn", i), torch::nn::RNN(kSize, kSize)));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = x.transpose(0, 1).contiguous();
    for (size_t i = 0; i < grus.size(); ++i) {
      y = std::get<0>(rnns[i](std::get<0>(grus[i](y))));
    }
    return y;
  }

  static constexpr int64_t kSize = 32;
  std::vector<torch::nn::GRU> grus;
  std::vector<torch::nn::RNN> rnns;
};
TORCH_MODULE(RecurrentNet);

TEST_P(PeakOfHalves, IsPredictedForRecurrentLayers) {
  torch::manual_seed(5);
  expect_predicted(peaks_of<RecurrentNet>(
      config_of(GetParam()).trace_memory_usage(true),
      torch::randn({kMicrobatches * 64, 16, RecurrentNetImpl::kSize}),
      [](RecurrentNet& net, const torch::Tensor& x) { return net->forward(x); }));
}

/// Without oneDNN, which knows neither double precision nor projections, it is made of products,
/// too.
template <bool kProjects>
struct LstmNetImpl : torch::nn::Module {
  LstmNetImpl() {
    for (int i = 0; i < 8; ++i) {
      const int64_t width = kProjects && i > 0 ? kSize / 2 : kSize;
      layers.push_back(register_module(
          c10::str("lstm", i),
          torch::nn::LSTM(
              torch::nn::LSTMOptions(width, kSize).proj_size(kProjects ? kSize / 2 : 0))));
    }
    if (!kProjects) to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x.transpose(0, 1).contiguous();
    for (auto& layer : layers) x = std::get<0>(layer(x));
    return x;
  }

  static constexpr int64_t kSize = 32;
  std::vector<torch::nn::LSTM> layers;
};

template <bool kProjects>
void expect_lstm_predicted(const char* pipeline, at::ScalarType type) {
  using Net = torch::nn::ModuleHolder<LstmNetImpl<kProjects>>;
  torch::manual_seed(5);
  expect_predicted(peaks_of<Net>(config_of(pipeline).trace_memory_usage(true),
                                 torch::randn({kMicrobatches * 64, 16, 32}, type),
                                 [](Net& net, const torch::Tensor& x) { return net->forward(x); }));
}

TEST_P(PeakOfHalves, IsPredictedForLstmsInDouble) {
  expect_lstm_predicted<false>(GetParam(), torch::kDouble);
}

TEST_P(PeakOfHalves, IsPredictedForLstmsWithProjections) {
  expect_lstm_predicted<true>(GetParam(), torch::kFloat);
}

const auto kSchedules =
    ::testing::Values("simple", "interleaved", "1f1b", "eager_1f1b", "interleaved_1f1b",
                      "breadth_first", "zb_h1", "zb_h2", "zbv");

INSTANTIATE_TEST_SUITE_P(Schedules, Peak, kSchedules);
INSTANTIATE_TEST_SUITE_P(Schedules, PeakUnderAutocast, kSchedules);
INSTANTIATE_TEST_SUITE_P(Schedules, PeakOfHalves, ::testing::Values("zb_h1", "zb_h2", "zbv"));

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
