// SPDX-License-Identifier: Apache-2.0
// A rank allocates in a step the amount predicted for its schedule. The plans do not depend
// on time: they follow from estimated times, or are files.

#include <ATen/Parallel.h>

#include <functional>
#include <mutex>
#include <optional>

#include "graph/absent.h"
#include "graph/allocations.h"
#include "partitioner/complete.h"
#include "partitioner/cuts.h"
#include "partitioner/plan_file.h"
#include "partitioner/predict.h"
#include "pipeline/generators.h"
#include "pipeline/observer.h"
#include "runtime/runtime.h"
#include "runtime/step/pipeline_choice.h"
#include "smp/autocast.h"
#include "tests/smp/oracle.h"
#include "tests/temp_folder.h"

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

/// The step of the program that runs, as `Program` plans it.
runtime::PlannedStep planned_step(const runtime::Runtime& runtime) {
  const auto& config = runtime.config();
  return runtime::plan_step(
      config, runtime.first_step.schedule, *runtime.first_step.graph, *runtime.first_step.plan,
      kRanks, runtime::step_model(config, kRanks, kMicrobatches, /*replicas=*/1), false);
}

std::vector<double> predicted_peaks(const runtime::Runtime& runtime) {
  const auto step = planned_step(runtime);
  auto peaks = step.simulation.peak_memory;
  for (size_t stage = 0; stage < step.prediction.stages.size(); ++stage) {
    peaks[runtime.first_step.plan->rank_of_stage[stage]] +=
        static_cast<double>(step.prediction.stages[stage].casts);
  }
  return peaks;
}

/// Trains each rank's net on microbatches of `x`: `trained` is called with the net and a step.
template <class Net>
void train_on_ranks(
    const Config& config, const torch::Tensor& x,
    const std::function<torch::Tensor(Net& net, const torch::Tensor&)>& forward,
    const std::function<void(Net& net, const std::function<void()>& train)>& trained) {
  at::set_num_threads(1);
  torch::manual_seed(5);
  std::vector<Net> nets;
  for (int i = 0; i < kRanks; ++i) nets.emplace_back();
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
    trained(net, [&] { train(x); });
  });
}

/// `forward` is called with each rank's net and a microbatch of `x`.
template <class Net>
Peaks peaks_of(const Config& config, const torch::Tensor& x,
               const std::function<torch::Tensor(Net& net, const torch::Tensor&)>& forward) {
  Peaks peaks;
  std::mutex mutex;
  train_on_ranks<Net>(config, x, forward, [&](Net& net, const std::function<void()>& train) {
    // `.grad` stays, so a step allocates the sums of gradients and the memory kept for backwards.
    const graph::Allocations allocations;
    train();
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

/// Measured times would cut anywhere on a busy machine.
Config config_of(const char* pipeline) {
  return Config()
      .partitions(kRanks)
      .microbatches(kMicrobatches)
      .pipeline(pipeline)
      .trace_execution_times(false)
      .seed(3);
}

/// Bytes that a rank is predicted to have allocated when a compute of its list begins, and how much
/// less and more they may be.
struct PredictedAllocations {
  double bytes = 0;
  double less = 0;  ///< messages of backwards between their halves, as far as they are still needed
  double more = 0;  ///< tensors that wait for another stage of the rank, and `kStatistics`
};

/// A step of a rank, as predicted and as it is.
struct KeptInStep {
  std::vector<PredictedAllocations> predicted;
  std::vector<double> measured;
  double predicted_peak = 0, peak = 0;
};

/// Bytes of a rank's allocations when its computes begin; then it has sent what it made.
struct KeptWatch final : pipeline::Observer {
  void on_begin(size_t /*index*/, const pipeline::Action& action) override {
    if (!action.is_compute()) return;
    bytes.push_back(static_cast<double>(allocations.now()));
  }

  const graph::Allocations allocations;
  std::vector<double> bytes;
};

/// The bytes of one microbatch that go from stage to stage, by stage.
struct Crossing {
  Crossing(const graph::Graph& graph, const partitioner::Plan& plan) {
    for (auto* bytes : {&values, &gradients, &by_forward, &by_backward}) {
      bytes->assign(plan.stages(), 0);
    }
    for (const auto& hop : plan.transfers) {
      const auto bytes = static_cast<double>(graph.values[hop.value].meta.nbytes());
      const double returned = hop.needs_gradient ? bytes : 0;
      if (plan.rank_of_stage[hop.from] == plan.rank_of_stage[hop.to]) {
        by_forward[hop.from] += bytes;
        by_forward[hop.to] -= bytes;
        by_backward[hop.to] += returned;
        by_backward[hop.from] -= returned;
      } else {
        values[hop.to] += bytes;
        gradients[hop.from] += returned;
      }
    }
  }

  std::vector<double> values, gradients;  ///< received from other ranks
  /// How many more wait for another stage of the rank after a forward or backward of this one.
  std::vector<double> by_forward, by_backward;
};

/// Between the halves of a backward normalizations keep their statistics: two for each row, in at
/// most eight layers.
constexpr double kStatistics = 8.0 * kBatch * kLength * 2 * sizeof(float);

/// The prediction is without what is received: ranks share the memory in which it lies, and this
/// thread has not allocated it. Beside it are the sums of gradients.
KeptInStep kept_in_step(const runtime::Runtime& runtime, const KeptWatch& watch) {
  const auto step = planned_step(runtime);
  const graph::Graph& graph = *runtime.first_step.graph;
  const partitioner::Plan& plan = *runtime.first_step.plan;
  const Crossing crossing(graph, plan);
  std::vector<double> sums(plan.stages(), 0);
  for (const auto& value : graph.values) {
    const auto owner = plan.owner.find(value.name);
    if (owner == plan.owner.end()) continue;
    sums[owner->second] += static_cast<double>(value.meta.nbytes());
  }
  KeptInStep result;
  result.measured = watch.bytes;
  PredictedAllocations now;
  double kept = 0, beside = 0;
  for (const auto& [action, start, end, memory] : step.simulation.timeline[rank()]) {
    now.bytes = kept + beside;
    if (action.is_compute()) result.predicted.push_back(now);
    kept = memory;
    const int stage = action.stage;
    if (action.kind == pipeline::Action::Kind::kForward) {
      beside -= crossing.values[stage];
      now.more += crossing.by_forward[stage];
    }
    if (action.makes_input_gradients()) {
      beside += crossing.values[stage];
      now.less += crossing.values[stage] + crossing.gradients[stage];
      now.more += kStatistics + crossing.by_backward[stage];
    }
    if (action.makes_weight_gradients()) {
      beside += std::exchange(sums[stage], 0);
      now.less -= crossing.values[stage] + crossing.gradients[stage];
      now.more -= kStatistics;
    }
  }
  result.predicted_peak = step.simulation.peak_memory[rank()] + beside;
  result.peak = static_cast<double>(watch.allocations.peak());
  return result;
}

using KeptByRank = std::vector<KeptInStep>;

class Kept : public ::testing::TestWithParam<const char*> {
 protected:
  KeptByRank run(Config config) {
    KeptByRank kept(kRanks);
    train_on_ranks<Layers>(
        config.trace_memory_usage(true), torch::randn({kMicrobatches * kBatch, kLength, kWidth}),
        [](Layers& net, const torch::Tensor& x) { return net->forward(x); },
        [&](Layers&, const std::function<void()>& train) {
          runtime::Runtime& runtime = runtime::Runtime::get();
          KeptWatch watch;
          runtime.execution.observers.push_back(&watch);
          train();
          runtime.execution.observers.clear();
          kept[rank()] = kept_in_step(runtime, watch);
          if (rank() > 0) return;
          graph_ = *runtime.first_step.measured;
          ranks_ = runtime.first_step.plan->rank_of_stage;
        });
    return kept;
  }

  /// The same with stages that end at the given operators of the last run's graph.
  KeptByRank run_cut(const std::vector<int>& ends) {
    std::vector<int> stage_of_operator(graph_.operators.size(), 0);
    for (const int end : ends) {
      for (size_t i = end + 1; i < stage_of_operator.size(); ++i) ++stage_of_operator[i];
    }
    const auto plan = partitioner::complete_plan(graph_, ranks_, stage_of_operator, {});
    const std::string path = folder_.write("plan.json", partitioner::plan_to_json(graph_, plan));
    return run(config_of(GetParam()).partition_file(path).load_partition(true));
  }

  /// From a first stage of one operator to a last of two, and once behind each operator of a layer.
  std::vector<std::vector<int>> cuts() const {
    const std::vector<bool> legal = partitioner::legal_cuts(graph_);
    const auto split = partitioner::split_weights(graph_);
    std::vector<int> ends;
    for (size_t i = 0; i < legal.size(); ++i) {
      if (legal[i] && split[i] == graph::kUndefined) ends.push_back(static_cast<int>(i));
    }
    const size_t stages = ranks_.size(), last = ends.size() - 1;
    std::vector<std::vector<int>> result;
    for (size_t first = 0; first + stages - 2 <= last; first += stages == 2 ? 9 : 11) {
      result.emplace_back();
      for (size_t i = 0; i + 1 < stages; ++i) {
        result.back().push_back(ends[std::min(first + i * i * 7, last - (stages - 2 - i))]);
      }
    }
    return result;
  }

  TempFolder folder_;
  graph::Graph graph_;
  std::vector<int> ranks_;
};

/// Beside what is predicted a step has its losses and the ends of histories.
void expect_predicted(const KeptByRank& ranks) {
  constexpr double kEnds = 4096, kWidest = kBatch * kLength * 4 * kWidth * sizeof(float);
  for (int rank = 0; rank < kRanks; ++rank) {
    SCOPED_TRACE(c10::str("rank ", rank));
    const auto& [predicted, measured, predicted_peak, peak] = ranks[rank];
    ASSERT_EQ(predicted.size(), measured.size());
    for (size_t i = 0; i < predicted.size(); ++i) {
      SCOPED_TRACE(c10::str("before compute ", i));
      const auto& [bytes, less, more] = predicted[i];
      EXPECT_GE(measured[i], bytes - less - kEnds);
      EXPECT_LE(measured[i], bytes + more + kEnds);
    }
    EXPECT_LE(peak, predicted_peak + 3 * kWidest) << "more than an operator needs while it runs";
  }
}

TEST_P(Kept, IsPredictedAtEachCut) {
  expect_predicted(run(config_of(GetParam())));
  for (const auto& ends : cuts()) {
    SCOPED_TRACE(c10::str("stages end at operators ", c10::Join(", ", ends)));
    expect_predicted(run_cut(ends));
  }
}

class Peak : public ::testing::TestWithParam<const char*> {};

TEST_P(Peak, IsPredictedWithinATenth) {
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

/// Each cell is an operator at each step of the sequence, with the same weights.
template <class Cell>
struct CellNetImpl : torch::nn::Module {
  CellNetImpl() {
    for (int i = 0; i < 24; ++i)
      cells.push_back(register_module(c10::str("cell", i), Cell(32, 32)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    std::vector<torch::Tensor> steps = x.transpose(0, 1).contiguous().unbind(0);
    for (auto& cell : cells) {
      const auto zeros = torch::zeros({x.size(0), 32});
      auto state = state_of(cell, zeros);
      for (auto& x_of_step : steps) {
        state = cell(x_of_step, state);
        x_of_step = result_of(state);
      }
    }
    return torch::stack(steps);
  }

  template <class Other>
  static torch::Tensor state_of(Other&, const torch::Tensor& zeros) {
    return zeros;
  }
  static std::tuple<torch::Tensor, torch::Tensor> state_of(torch::nn::LSTMCell&,
                                                           const torch::Tensor& zeros) {
    return {zeros, zeros};
  }
  static torch::Tensor result_of(const torch::Tensor& state) { return state; }
  static torch::Tensor result_of(const std::tuple<torch::Tensor, torch::Tensor>& state) {
    return std::get<0>(state);
  }

  std::vector<Cell> cells;
};

template <class Cell>
void expect_cells_predicted(const char* pipeline) {
  using Net = torch::nn::ModuleHolder<CellNetImpl<Cell>>;
  torch::manual_seed(5);
  expect_predicted(peaks_of<Net>(config_of(pipeline).trace_memory_usage(true),
                                 torch::randn({kMicrobatches * 64, 4, 32}),
                                 [](Net& net, const torch::Tensor& x) { return net->forward(x); }));
}

TEST_P(PeakOfHalves, IsPredictedForLstmCells) {
  expect_cells_predicted<torch::nn::LSTMCell>(GetParam());
}

TEST_P(PeakOfHalves, IsPredictedForGruCells) {
  expect_cells_predicted<torch::nn::GRUCell>(GetParam());
}

TEST_P(PeakOfHalves, IsPredictedForRnnCells) {
  expect_cells_predicted<torch::nn::RNNCell>(GetParam());
}

const auto kSchedules =
    ::testing::Values("simple", "interleaved", "1f1b", "eager_1f1b", "interleaved_1f1b",
                      "breadth_first", "zb_h1", "zb_h2", "zbv");

INSTANTIATE_TEST_SUITE_P(Schedules, Kept, kSchedules);
INSTANTIATE_TEST_SUITE_P(Schedules, Peak, kSchedules);
INSTANTIATE_TEST_SUITE_P(Schedules, PeakUnderAutocast, kSchedules);
INSTANTIATE_TEST_SUITE_P(Schedules, PeakOfHalves, ::testing::Values("zb_h1", "zb_h2", "zbv"));

}  // namespace
}  // namespace smp::testing
