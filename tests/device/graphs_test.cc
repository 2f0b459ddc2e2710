// SPDX-License-Identifier: Apache-2.0
// Training steps whose computations are launched as graphs of the fake device: how often, when not,
// and that the graphs' memory is not kept. parity_test has their bits in all layouts.

#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "smp/smp.h"
#include "tests/device/fake_device.h"
#include "tests/device/text_net.h"
#include "tests/error_of.h"
#include "tests/smp/oracle.h"

namespace smp::testing {
namespace {

constexpr int kMicrobatches = 2;
constexpr int kSteps = 4;

/// A net and its step function's work on a microbatch.
struct Training {
  std::function<torch::Tensor(TextNet&, torch::Tensor, torch::Tensor)> loss =
      [](TextNet& net, torch::Tensor x, torch::Tensor y) { return net->loss(x, y); };
  /// Before step i.
  std::function<void(TextNet&, int)> before = [](TextNet&, int) {};
  /// The inputs of step i.
  std::function<Tensors(Tensors, int)> given = [](Tensors batch, int) { return batch; };
  Config config = Config().microbatches(kMicrobatches);
  ModelOptions options;
  int replicas = 1;
  int steps = kSteps;
  int64_t rows = 2 * kMicrobatches;  // rows of a batch
  bool evaluates = false;            // before each step
};

struct Result {
  std::vector<torch::Tensor> losses;   // losses by step
  std::vector<torch::Tensor> outputs;  // outputs of evaluations
  Named weights;
  std::vector<int> launches;  // launches of graphs, by step
};

/// Returns its argument, in the second half of its memory if the first number is above zero. The
/// host has to wait for that number.
torch::Tensor moved(const torch::Tensor& x) {
  const int64_t begin = !x.is_meta() && x.flatten()[0].item<float>() > 0 ? x.size(0) : 0;
  return torch::cat({x, x}).narrow(0, begin, x.size(0));
}

TORCH_LIBRARY(smp_graphs_test, m) {
  m.def("moved(Tensor x) -> Tensor");
  m.impl("moved", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &moved));
}

struct MovingNetImpl : torch::nn::Module {
  MovingNetImpl() {
    scale = register_parameter("scale", torch::ones({1}), false);
    first = register_module("first", torch::nn::Linear(5, 5));
    second = register_module("second", torch::nn::Linear(5, 5));
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("smp_graphs_test::moved", "");
    {
      const auto scope = partition(0);
      x = op.typed<torch::Tensor(const torch::Tensor&)>().call(x * scale);
    }
    return second(torch::tanh(first(x))).square().mean();
  }

  torch::Tensor scale;
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(MovingNet);

TextNet make_net() {
  torch::manual_seed(5);
  return TextNet();
}

std::vector<Tensors> make_batches(int steps = kSteps, int64_t rows = 2 * kMicrobatches) {
  torch::manual_seed(7);
  std::vector<Tensors> batches;
  const auto make = [rows] {
    return torch::randint(TextNetImpl::kVocabulary, {rows, TextNetImpl::kLength});
  };
  for (int i = 0; i < steps; ++i) batches.push_back({make(), make()});
  return batches;
}

Result train(const Training& training, const std::string& graphs, int stages = 1) {
  const int ranks = stages * training.replicas;
  const auto batches = make_batches(training.steps, training.rows);
  std::vector<TextNet> nets;
  for (int i = 0; i < ranks; ++i) nets.push_back(make_net());
  std::mutex mutex;
  Result result;
  take_fake_launches();
  Config config = training.config;
  config.cuda_graphs(graphs).partitions(stages).seed(kSeed).timeout_seconds(60);
  run_as_threads(ranks, config, [&] {
    set_device(rank());
    TextNet net = nets[rank()];
    DistributedModel<TextNet> model(net, training.options);
    DistributedOptimizer<torch::optim::AdamW> optimizer(model->parameters(),
                                                        torch::optim::AdamWOptions(0.01));
    auto train_step = step([&](torch::Tensor x, torch::Tensor y) {
      auto loss = training.loss(net, x, y);
      model->backward(loss);
      return loss;
    });
    auto evaluate = step([&](torch::Tensor x) { return net->forward(x); });
    for (int i = 0; i < training.steps; ++i) {
      training.before(net, i);
      optimizer.zero_grad();
      const Tensors given = training.given(batches[i], i);
      if (training.evaluates) {
        net->eval();
        const auto outputs = evaluate(given[0]).concat().cpu();
        net->train();
        if (rank() == 0) result.outputs.push_back(outputs);
      }
      const auto losses = train_step(given[0], given[1]);
      optimizer.step();
      barrier();
      if (rank() == 0) {
        result.losses.push_back(losses.reduce_mean().cpu());
        result.launches.push_back(take_fake_launches());
      }
      barrier();
    }
    const auto state = to_map(model->state_dict());
    const std::lock_guard<std::mutex> lock(mutex);
    if (rank() == 0) result.weights = state;
  });
  return result;
}

void expect_same(const Result& result, const Result& expected) {
  expect_equal(result.losses, expected.losses, "losses");
  expect_equal(result.outputs, expected.outputs, "outputs");
  expect_equal(result.weights, expected.weights, "weights");
}

/// On the device, and not at the start of its memory.
torch::Tensor shifted(const torch::Tensor& x) {
  return torch::cat({x.narrow(0, 0, 1), x}).to(device()).narrow(0, 1, x.size(0));
}

class Graphs : public ::testing::Test {
 protected:
  void SetUp() override { torch::set_num_threads(1); }

  /// Trains with graphs and without; the same bits. Returns how many were launched, by step.
  std::vector<int> launches_of(const Training& training, int stages = 1) {
    const Result plain = train(training, "off", stages);
    EXPECT_EQ(plain.launches, std::vector<int>(training.steps, 0));
    ::testing::internal::CaptureStderr();
    const Result with_graphs = train(training, "auto", stages);
    log_ = ::testing::internal::GetCapturedStderr();
    expect_same(with_graphs, plain);
    return with_graphs.launches;
  }

  std::string log_;
};

TEST_F(Graphs, AreLaunchedFromTheSecondStepOn) {
  EXPECT_EQ(launches_of({}), (std::vector<int>{0, 4, 4, 4})) << "2 microbatches, forward, backward";
  expect_has(log_, {"\"cuda_graphs\": 4 computations of 1 stage are captured in 2 graphs"});
}

TEST_F(Graphs, AreThoseOfEachStageOfEachRank) {
  Training training;
  training.config.virtual_stages(2);
  EXPECT_EQ(launches_of(training, 2), (std::vector<int>{0, 16, 16, 16}));
  expect_has(log_, {"\"cuda_graphs\": 8 computations of 2 stages are captured"});
}

TEST_F(Graphs, HaveHalfPrecisionAndTheLossScale) {
  Training training;
  training.config.bf16(true);
  EXPECT_EQ(launches_of(training, 2).back(), 8);
}

TEST_F(Graphs, GiveReplicasTheirGradients) {
  for (const bool shards : {false, true}) {
    Training training;
    training.replicas = 2;
    training.config.ddp(true).shard_optimizer_state(shards);
    EXPECT_EQ(launches_of(training), (std::vector<int>{0, 8, 8, 8}));
  }
}

/// Which tries schedules, each with graphs of its own, and chooses by the device's clock.
TEST_F(Graphs, AreThoseOfTheScheduleThatAutoChooses) {
  Training training;
  training.config.pipeline("auto").cost_model("measured");
  training.steps = 16;
  EXPECT_GE(launches_of(training, 2).back(), 2 * kMicrobatches * 2);
}

/// Sums the graphs that the ranks report.
int graphs_in(const std::string& log) {
  const std::string before = " captured in ";
  int count = 0;
  for (size_t at = log.find(before); at != std::string::npos; at = log.find(before, at + 1)) {
    count += std::stoi(log.substr(at + before.size()));
  }
  return count;
}

/// Nothing is sent to the first stage's inputs, so the first half of its backward gives the device
/// nothing.
TEST_F(Graphs, AreNotLaunchedWhereAStageComputesNothing) {
  Training training;
  training.config.pipeline("zb_h1");
  const int launches = launches_of(training, 2).back();
  EXPECT_GT(launches, 0);
  EXPECT_LT(launches, graphs_in(log_)) << log_;
}

/// Graphs of ranks that run four microbatches, which lie alike, in a step.
struct Captured {
  std::string pipeline;
  int stages;
  int virtual_stages;
  int launches;  // launches in a step
  int graphs;
};

std::ostream& operator<<(std::ostream& out, const Captured& captured) {
  return out << captured.pipeline << ", " << captured.stages << " stages, "
             << captured.virtual_stages << " on a rank";
}

Training four_microbatches() {
  Training training;
  training.config.microbatches(4);
  training.rows = 4 * 8;
  return training;
}

class FewGraphs : public Graphs, public ::testing::WithParamInterface<Captured> {};

/// Where no forward waits for its backward, the graphs before have nothing in their memory.
TEST_P(FewGraphs, ServeTheMicrobatchesThatRunLikewise) {
  const Captured& expected = GetParam();
  Training training = four_microbatches();
  training.config.pipeline(expected.pipeline).virtual_stages(expected.virtual_stages);
  EXPECT_EQ(launches_of(training, expected.stages).back(), expected.launches);
  EXPECT_EQ(graphs_in(log_), expected.graphs) << log_;
}

INSTANTIATE_TEST_SUITE_P(Each, FewGraphs,
                         ::testing::Values(Captured{"interleaved", 1, 1, 8, 2},
                                           Captured{"1f1b", 2, 1, 16, 8 + 2},
                                           Captured{"simple", 2, 1, 16, 8 + 8},
                                           Captured{"zb_h1", 2, 1, 20, 12 + 12},
                                           Captured{"interleaved", 2, 2, 32, 32}));

/// Two are one backward pass: the second adds to the sums of the first.
TEST_F(Graphs, ServeSumsOverTwoSteps) {
  Training training = four_microbatches();
  training.options.backward_passes_per_step(2);
  EXPECT_EQ(launches_of(training).back(), 8);
  EXPECT_EQ(graphs_in(log_), 2) << log_;
}

TEST_F(Graphs, ServeHalfPrecisionWithALossScale) {
  Training training = four_microbatches();
  training.config.fp16(true);
  EXPECT_EQ(launches_of(training).back(), 8);
  EXPECT_EQ(graphs_in(log_), 2) << log_;
}

/// Microbatches of 80 bytes begin at 0, 16, 32 and 48 bytes from a multiple of 64 in the batch.
TEST_F(Graphs, ServeMicrobatchesThatBeganElsewhere) {
  Training training = four_microbatches();
  training.rows = 4 * 2;
  EXPECT_EQ(launches_of(training).back(), 8);
  EXPECT_EQ(graphs_in(log_), 2) << log_;
}

/// Training has two, and evaluation one.
TEST_F(Graphs, AreLaunchedInTurnWithThoseOfEvaluation) {
  Training training = four_microbatches();
  training.evaluates = true;
  EXPECT_EQ(launches_of(training), (std::vector<int>{0, 12, 12, 12}));
  EXPECT_EQ(graphs_in(log_), 2 + 1) << log_;
}

/// Memory that a launch reads must not go before.
TEST_F(Graphs, AreKeptUntilTheDeviceIsDoneWithThem) {
  const auto batches = make_batches();
  TextNet net = make_net();
  HostUses uses;
  run_as_threads(1, Config().cuda_graphs("on").microbatches(kMicrobatches).seed(kSeed), [&] {
    set_device(0);
    DistributedModel<TextNet> model(net);
    {
      auto train_step = step([&](torch::Tensor x, torch::Tensor y) {
        auto loss = net->loss(x, y);
        model->backward(loss);
        return loss;
      });
      for (int i = 0; i < 2; ++i) train_step(batches[i][0], batches[i][1]);
      uses.take(0);
    }
    std::set<std::string> waits;
    for (const HostUse& use : uses.take(0)) waits.insert(use.what);
    EXPECT_EQ(waits.count("waits for a stream"), 1u);
  });
}

TEST_F(Graphs, AreLaunchedForInputsThatBeganElsewhere) {
  Training training;
  training.given = [](const Tensors& batch, int i) {
    return Tensors{i == 2 ? shifted(batch[0]) : batch[0], batch[1]};
  };
  EXPECT_EQ(launches_of(training), (std::vector<int>{0, 4, 4, 4}));
}

/// A microbatch by where it begins when it comes to the second stage: at its memory, or 60 bytes
/// after it.
using Places = std::vector<std::vector<bool>>;

/// Trains three stages, the first of which runs operator by operator. Returns launches and losses
/// by step.
Result train_moving(const std::string& graphs, const Places& places) {
  std::vector<MovingNet> nets;
  for (int i = 0; i < 3; ++i) {
    torch::manual_seed(5);
    nets.emplace_back();
  }
  Result result;
  take_fake_launches();
  run_as_threads(
      3, stages(3).cuda_graphs(graphs).microbatches(kMicrobatches).active_microbatches(1), [&] {
        set_device(rank());
        MovingNet net = nets[rank()];
        set_partition(*net->first, 1);
        set_partition(*net->second, 2);
        DistributedModel<MovingNet> model(net);
        auto train_step = step([&](torch::Tensor x) {
          auto loss = net->forward(x);
          model->backward(loss);
          return loss;
        });
        for (const auto& of_step : places) {
          auto x = torch::ones({kMicrobatches, 3, 5});
          for (int m = 0; m < kMicrobatches; ++m) x[m] *= of_step[m] ? 1 : -1;
          const auto losses = train_step(x.flatten(0, 1)).stack().cpu();
          barrier();
          if (rank() == 0) {
            result.losses.push_back(losses);
            result.launches.push_back(take_fake_launches());
          }
          barrier();
        }
      });
  return result;
}

/// Kernels may take another way there. The third stage gets nothing that lies otherwise.
TEST_F(Graphs, AreNotLaunchedForValuesThatBeginElsewhere) {
  const Places places = {{false, false}, {false, false}, {true, true}, {false, false}};
  const Result plain = train_moving("off", places);
  ::testing::internal::CaptureStderr();
  const Result with_graphs = train_moving("auto", places);
  const std::string log = ::testing::internal::GetCapturedStderr();
  expect_same(with_graphs, plain);
  EXPECT_EQ(with_graphs.launches, (std::vector<int>{0, 8, 4, 8})) << log;
  expect_has(log, {"stage 1 runs a microbatch operator by operator: what it gets begins elsewhere "
                   "between two multiples of 64 bytes than in the first step"});
}

TEST_F(Graphs, ServeNoMicrobatchThatLiesOtherwise) {
  const Places places(2, {false, true});
  const Result plain = train_moving("off", places);
  ::testing::internal::CaptureStderr();
  const Result with_graphs = train_moving("auto", places);
  const std::string log = ::testing::internal::GetCapturedStderr();
  expect_same(with_graphs, plain);
  EXPECT_EQ(with_graphs.launches, (std::vector<int>{0, 8})) << log;
  expect_has(log, {"pp 1/3] \"cuda_graphs\": 4 computations of 1 stage are captured in 4 graphs",
                   "pp 2/3] \"cuda_graphs\": 4 computations of 1 stage are captured in 2 graphs"});
}

TEST_F(Graphs, AreCapturedAnewWhenAParameterHasOtherMemory) {
  Training training;
  training.before = [](TextNet& net, int i) {
    if (i == 2) {
      auto weight = net->blocks[1]->layer->weight;
      weight.set_data(weight.detach().clone());
    }
  };
  EXPECT_EQ(launches_of(training), (std::vector<int>{0, 4, 4, 4}));
  const auto first = log_.find("are captured");
  ASSERT_NE(first, std::string::npos);
  EXPECT_NE(log_.find("are captured", first + 1), std::string::npos);
}

TEST_F(Graphs, EndWhereNumbersChangeBetweenCalls) {
  Training training;
  double factor = 1;
  training.before = [&factor](TextNet&, int i) { factor = i < 2 ? 1.0 : 0.25 * i; };
  training.loss = [&factor](TextNet& net, torch::Tensor x, torch::Tensor y) {
    return net->loss(x, y) * factor;
  };
  EXPECT_EQ(launches_of(training), (std::vector<int>{0, 4, 0, 0}));
  expect_has(log_, {"\"cuda_graphs\": runs operator by operator: numbers that the step function "
                    "uses change between its calls"});
}

/// Writes where a mask says so, for which the host has to know in how many places.
torch::Tensor loss_with_mask(TextNet& net, torch::Tensor x, torch::Tensor y) {
  auto rows = net->forward(x).flatten(0, 1);
  rows = rows.index_put({x.flatten() == 3}, torch::ones_like(rows[0]));
  return torch::nn::functional::cross_entropy(rows, y.flatten());
}

TEST_F(Graphs, AreNotCapturedWhereTheHostWaits) {
  Training training;
  training.loss = loss_with_mask;
  EXPECT_EQ(launches_of(training), (std::vector<int>{0, 0, 0, 0}));
  expect_has(log_, {"runs operator by operator: operation not permitted when stream is capturing",
                    "(aten::index_put)"});
}

TEST_F(Graphs, AreAnErrorWhereTheyAreAskedForAndCannotBe) {
  Training training;
  training.loss = loss_with_mask;
  const auto text = error_of<UsageError>([&] { train(training, "on"); });
  expect_has(text, {"\"cuda_graphs\": \"on\", but not all that this rank computes can be captured: "
                    "operation not permitted when stream is capturing",
                    "(aten::index_put)", "Set it to \"auto\" to run that operator by operator"});
}

TEST_F(Graphs, LeaveLeavesToTheHost) {
  Training training;
  training.loss = [](TextNet& net, torch::Tensor x, torch::Tensor y) {
    return torch::nn::functional::cross_entropy(leaf(net)(x).flatten(0, 1), y.flatten());
  };
  EXPECT_EQ(launches_of(training), (std::vector<int>{0, 0, 0, 0}));
  expect_has(log_, {"runs operator by operator: stage 0: operator",
                    "may have the host do more than give the device work"});
}

/// The call of a leaf is another one in each step, which ends no graphs of the other stage.
TEST_F(Graphs, AreLaunchedBesideTheLeafOfAnotherStage) {
  Training training;
  training.loss = [](TextNet& net, torch::Tensor x, torch::Tensor y) {
    torch::Tensor factors;
    {
      const auto scope = partition(0);
      factors = leaf(torch::nn::Tanh())(x.to(torch::kFloat)).unsqueeze(-1);
    }
    return torch::nn::functional::cross_entropy((net->forward(x) * factors).flatten(0, 1),
                                                y.flatten());
  };
  EXPECT_EQ(launches_of(training, 2), (std::vector<int>{0, 4, 4, 4}));
  expect_has(log_, {"runs operator by operator: stage 0: operator",
                    "\"cuda_graphs\": 4 computations of 1 stage are captured"});
}

TEST_F(Graphs, AreNoneOnTheCpu) {
  Config config;
  config.cuda_graphs("on").microbatches(1);
  torch::nn::Linear net(2, 2);
  const auto text = error_of<UsageError>([&] {
    run_as_threads(1, config, [&] {
      DistributedModel<torch::nn::Linear> model(net);
      auto train_step = step([&](torch::Tensor x) {
        auto loss = net(x).sum();
        model->backward(loss);
        return loss;
      });
      train_step(torch::ones({1, 2}));
    });
  });
  expect_has(text, {"\"cuda_graphs\": \"on\"", "device cpu has none"});
}

/// Gradients, losses and outputs are the program's, though the graphs run again.
TEST_F(Graphs, LendNobodyTheirMemory) {
  const auto batches = make_batches();
  TextNet net = make_net();
  Config config;
  config.cuda_graphs("on").microbatches(kMicrobatches).seed(kSeed);
  run_as_threads(1, config, [&] {
    set_device(0);
    DistributedModel<TextNet> model(net);
    auto train_step = step([&](torch::Tensor x, torch::Tensor y) {
      const auto logits = net->forward(x);
      auto loss = torch::nn::functional::cross_entropy(logits.flatten(0, 1), y.flatten());
      model->backward(loss);
      return std::make_tuple(loss, logits);
    });
    train_step(batches[0][0], batches[0][1]);
    net->zero_grad();
    const auto [losses, logits] = train_step(batches[1][0], batches[1][1]);
    Tensors kept = {losses.outputs()[0], losses.outputs()[1], logits.outputs()[0],
                    logits.outputs()[1]};
    for (const auto& parameter : net->parameters()) kept.push_back(parameter.grad());
    Tensors copies;
    for (const auto& tensor : kept) copies.push_back(tensor.cpu());
    net->zero_grad();
    take_fake_launches();
    train_step(batches[2][0], batches[2][1]);
    EXPECT_EQ(take_fake_launches(), 4);
    for (size_t i = 0; i < kept.size(); ++i) expect_equal({kept[i].cpu()}, {copies[i]}, "kept");
    const auto sum = net->blocks[0]->layer->weight.grad().cpu();
    train_step(batches[2][0], batches[2][1]);  // adds to the old one
    EXPECT_FALSE(torch::equal(net->blocks[0]->layer->weight.grad().cpu(), sum));
  });
}

TEST_F(Graphs, RunEvaluationsToo) {
  const auto batches = make_batches();
  std::vector<torch::Tensor> outputs[2];
  for (const bool with_graphs : {false, true}) {
    TextNet net = make_net();
    Config config;
    config.cuda_graphs(with_graphs ? "on" : "off").microbatches(kMicrobatches);
    run_as_threads(1, config, [&] {
      set_device(0);
      DistributedModel<TextNet> model(net);
      net->eval();
      auto evaluate = step([&](torch::Tensor x) { return net->forward(x); });
      take_fake_launches();
      for (const Tensors& batch : batches) {
        outputs[with_graphs].push_back(evaluate(batch[0]).concat().cpu());
      }
      EXPECT_EQ(take_fake_launches(), with_graphs ? (kSteps - 1) * kMicrobatches : 0);
    });
  }
  expect_equal(outputs[1], outputs[0], "outputs");
}

}  // namespace
}  // namespace smp::testing
