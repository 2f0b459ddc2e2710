// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/covering_array.h"
#include "tests/smp/tensor_parallel_run.h"
#include "tests/smp/tensor_parallel_transformer.h"

// Models of several kinds that know nothing of tensor parallelism, divided through the runtime,
// against one plain libtorch process.
namespace smp {
namespace {

using namespace testing;

constexpr int64_t kAll = kMicrobatches * kSamples;
/// Losses are so much larger than usual that gradients are clipped in every step.
constexpr double kScale = 32;

/// Numbers of the batch of a step, in float64.
Tensors random_batch(int number, torch::IntArrayRef x, torch::IntArrayRef y) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + number);
  const auto first = torch::randn(x, generator, torch::kDouble);
  return {first, torch::randn(y, generator, torch::kDouble)};
}

/// Patches by a convolution, a class token and positions, attention with dropout.
struct Vit : torch::nn::Module {
  Vit() {
    patches = register_module("patches",
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(3, kWidth, 4).stride(4)));
    token = register_parameter("token", torch::randn({1, 1, kWidth}));
    positions = register_parameter("positions", torch::randn({1, 5, kWidth}));
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(
          register_module("block" + std::to_string(i),
                          std::make_shared<TransformerBlock>(kWidth, 4, 0.1, /*causal=*/false)));
    }
    last = register_module("last", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    head = register_module("head", torch::nn::Linear(kWidth, kClasses));
  }

  torch::Tensor loss(torch::Tensor images, torch::Tensor classes) {
    auto x = patches(images).flatten(2).transpose(1, 2);
    x = torch::cat({token.expand({x.size(0), -1, -1}), x}, 1) + positions;
    for (const auto& block : blocks) x = block->forward(x);
    return kScale * torch::nn::functional::cross_entropy(head(last(x).select(1, 0)), classes);
  }

  static Tensors step_batch(int number) {
    const auto batch = random_batch(number, {kAll, 3, 8, 8}, {kAll, kClasses});
    return {batch[0], batch[1].argmax(1)};
  }

  static std::set<std::string> must_be_divided() {
    return {"block0.qkv.weight", "block0.qkv.bias", "block0.projection.weight",
            "block1.up.weight",  "block1.up.bias",  "block1.down.weight",
            "block1.qkv.weight"};
  }

  /// Whether ranks have parts between divided layers: of samples, there are five positions.
  static bool has_streams(int ranks) { return kSamples % ranks == 0; }

  static constexpr int64_t kWidth = 16, kClasses = 8;
  torch::nn::Conv2d patches{nullptr};
  torch::Tensor token, positions;
  std::vector<std::shared_ptr<TransformerBlock>> blocks;
  torch::nn::LayerNorm last{nullptr};
  torch::nn::Linear head{nullptr};
};

/// Two levels down, two up; outputs on the way down skip to the level on the way up.
struct Skips : torch::nn::Module {
  Skips() {
    const auto layer = [&](const char* name, int64_t from, int64_t to) {
      return register_module(name, torch::nn::Linear(from, to));
    };
    in = layer("in", 8, 16);
    down0 = layer("down0", 16, 32);
    down1 = layer("down1", 32, 32);
    wide = layer("wide", 32, 64);
    narrow = layer("narrow", 64, 32);
    up1 = layer("up1", 64, 32);
    up0 = layer("up0", 48, 16);
    out = layer("out", 16, 8);
    drop = register_module("drop", torch::nn::Dropout(0.1));
  }

  static torch::Tensor halve(const torch::Tensor& x) {
    return x.view({x.size(0), x.size(1) / 2, 2, x.size(2)}).mean(2);
  }

  static torch::Tensor twice(const torch::Tensor& x) {
    const int64_t length = x.size(1), width = x.size(2);
    return x.unsqueeze(2).expand({-1, -1, 2, -1}).reshape({x.size(0), 2 * length, width});
  }

  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const auto first = torch::gelu(in(x));
    const auto second = torch::gelu(down0(halve(first)));
    auto z = torch::gelu(down1(halve(second)));
    z = z + drop(narrow(torch::gelu(wide(z))));
    z = torch::gelu(up1(torch::cat({twice(z), second}, -1)));
    z = torch::gelu(up0(torch::cat({twice(z), first}, -1)));
    return kScale * torch::mse_loss(out(drop(z)), y);
  }

  static Tensors step_batch(int number) { return random_batch(number, {kAll, 8, 8}, {kAll, 8, 8}); }

  static std::set<std::string> must_be_divided() { return {"wide.weight", "narrow.weight"}; }
  static bool has_streams(int) { return true; }

  torch::nn::Linear in{nullptr}, down0{nullptr}, down1{nullptr}, wide{nullptr}, narrow{nullptr},
      up1{nullptr}, up0{nullptr}, out{nullptr};
  torch::nn::Dropout drop{nullptr};
};

struct WideMlp : torch::nn::Module {
  WideMlp() {
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Linear(8, 32), torch::nn::Tanh(),
                                        torch::nn::Dropout(0.1), torch::nn::Linear(32, 64),
                                        torch::nn::ReLU(), torch::nn::Linear(64, 32),
                                        torch::nn::GELU(), torch::nn::Linear(32, 4)));
  }

  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    return kScale * torch::mse_loss(layers->forward(x), y);
  }

  static Tensors step_batch(int number) { return random_batch(number, {kAll, 8}, {kAll, 4}); }

  static std::set<std::string> must_be_divided() { return {"layers.0.weight", "layers.3.weight"}; }
  static bool has_streams(int ranks) { return kSamples % ranks == 0; }

  torch::nn::Sequential layers{nullptr};
};

/// Batch norm behind layers that are divided: it computes on whole values. These layers have no
/// biases, as batch norm would take them out again: their gradients are zero up to rounding.
struct Normalised : torch::nn::Module {
  Normalised() {
    up = register_module("up", torch::nn::Linear(8, 32));
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(32, 16).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    wide = register_module("wide", torch::nn::Linear(torch::nn::LinearOptions(16, 32).bias(false)));
    wide_norm = register_module("wide_norm", torch::nn::BatchNorm1d(32));
    head = register_module("head", torch::nn::Linear(32, 4));
  }

  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    auto z = norm(down(torch::tanh(up(x.flatten(0, 1)))));
    z = torch::relu(wide_norm(wide(torch::relu(z))));
    return kScale * torch::mse_loss(head(z), y.flatten(0, 1));
  }

  static Tensors step_batch(int number) { return random_batch(number, {kAll, 6, 8}, {kAll, 6, 4}); }

  static std::set<std::string> must_be_divided() { return {"up.weight", "down.weight"}; }
  /// Between sums and norms nothing is kept that the layers behind do not keep anyway.
  static bool has_streams(int) { return false; }

  torch::nn::Linear up{nullptr}, down{nullptr}, wide{nullptr}, head{nullptr};
  torch::nn::BatchNorm1d norm{nullptr}, wide_norm{nullptr};
};

/// A decoder with dropout, whose sequences four ranks can share.
struct Gpt : torch::nn::Module {
  Gpt() {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    positions = register_parameter("positions", torch::randn({kLength, kWidth}));
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(
          register_module("block" + std::to_string(i),
                          std::make_shared<TransformerBlock>(kWidth, 4, 0.1, /*causal=*/true)));
    }
    last = register_module("last", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    head = register_module("head", torch::nn::Linear(kWidth, kVocabulary));
  }

  torch::Tensor loss(torch::Tensor ids, torch::Tensor targets) {
    auto x = torch::dropout(tokens(ids) + positions, 0.1, is_training());
    for (const auto& block : blocks) x = block->forward(x);
    const auto logits = head(last(x));
    return kScale * torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  }

  static Tensors step_batch(int number) {
    const auto batch =
        random_batch(number, {kAll, kLength, kVocabulary}, {kAll, kLength, kVocabulary});
    return {batch[0].argmax(2), batch[1].argmax(2)};
  }

  static std::set<std::string> must_be_divided() {
    return {"block0.qkv.weight", "block0.projection.weight", "block1.up.weight", "head.weight"};
  }

  static bool has_streams(int) { return true; }

  static constexpr int64_t kWidth = 16, kLength = 8, kVocabulary = 12;
  torch::nn::Embedding tokens{nullptr};
  torch::Tensor positions;
  std::vector<std::shared_ptr<TransformerBlock>> blocks;
  torch::nn::LayerNorm last{nullptr};
  torch::nn::Linear head{nullptr};
};

/// libtorch's own layers, which normalise behind each sum, on [length, samples, width].
struct Encoder : torch::nn::Module {
  Encoder() {
    in = register_module("in", torch::nn::Linear(8, 16));
    layers = register_module(
        "layers",
        torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
            torch::nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(32).dropout(0.1), 2)));
    out = register_module("out", torch::nn::Linear(16, 4));
  }

  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    const auto z = layers(in(x).transpose(0, 1)).transpose(0, 1);
    return kScale * torch::mse_loss(out(z), y);
  }

  static Tensors step_batch(int number) {
    return random_batch(number, {kAll, kLength, 8}, {kAll, kLength, 4});
  }

  static std::set<std::string> must_be_divided() {
    return {"layers.layers.0.self_attn.in_proj_weight", "layers.layers.1.linear1.weight",
            "layers.layers.1.linear2.weight"};
  }

  static bool has_streams(int) { return true; }

  static constexpr int64_t kLength = 8;
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::TransformerEncoder layers{nullptr};
};

template <class Net>
Outcome run_marked(const TensorLayout& layout, const std::string& optimize = "memory") {
  return run_on_ranks<Net>(
      layout, [](Net& net) { set_tensor_parallelism(net); },
      [&](Config config) { return config.optimize(optimize); });
}

template <class Net>
void expect_divided(const Outcome& got) {
  for (const auto& name : Net::must_be_divided()) EXPECT_EQ(got.divided.count(name), 1u) << name;
}

/// The results are those of one process.
template <class Net>
void check(const TensorLayout& layout, const std::string& optimize) {
  const auto got = run_marked<Net>(layout, optimize);
  expect_divided<Net>(got);
  expect_close(got, run_plain<Net>());
  const bool in_parts = optimize == "memory" && Net::has_streams(layout.degree);
  EXPECT_EQ(divided_streams(got.report) > 0, in_parts) << got.report;
}

struct ModelCase {
  std::string model;
  void (*check)(const TensorLayout& layout, const std::string& optimize);
  TensorLayout layout = {1};
  std::string optimize = {};
};

std::ostream& operator<<(std::ostream& out, const ModelCase& one) {
  return out << one.model << ", " << one.layout << ", " << one.optimize;
}

std::vector<ModelCase> model_cases() {
  std::vector<ModelCase> product;
  for (const ModelCase& model :
       {ModelCase{"VisionTransformer", check<Vit>}, ModelCase{"Skips", check<Skips>},
        ModelCase{"Decoder", check<Gpt>}, ModelCase{"Encoder", check<Encoder>},
        ModelCase{"Perceptron", check<WideMlp>}}) {
    for (const TensorLayout& layout :
         {TensorLayout{2}, TensorLayout{4}, TensorLayout{2, 2}, TensorLayout{4, 2},
          TensorLayout{2, 1, 2}, TensorLayout{2, 2, 2}}) {
      for (const char* optimize : {"speed", "memory"}) {
        product.push_back({model.model, model.check, layout, optimize});
      }
    }
  }
  return cases_of(product, [](const ModelCase& one) {
    return Factors{one.model, c10::str(one.layout), one.optimize};
  });
}

class TensorParallelModels : public ::testing::TestWithParam<ModelCase> {};

TEST_P(TensorParallelModels, TrainAsOneProcess) {
  GetParam().check(GetParam().layout, GetParam().optimize);
}

INSTANTIATE_TEST_SUITE_P(Pairs, TensorParallelModels, ::testing::ValuesIn(model_cases()),
                         [](const auto& info) {
                           return info.param.model + std::to_string(info.index);
                         });

/// The same of "speed", and in other layouts: tensor_parallel_rewrite_test.
TEST(TensorParallelResults, AreTheSameInASecondRun) {
  expect_same(run_marked<Gpt>({4, 2}), run_marked<Gpt>({4, 2}));
  expect_same(run_marked<Encoder>({2, 2, 2}), run_marked<Encoder>({2, 2, 2}));
}

/// Each microbatch of the group updates the statistics once, in their order, as in one process:
/// buffers are among the values that `check` compares. (With replicas each has its own.)
class TensorParallelBatchNorm : public ::testing::TestWithParam<TensorLayout> {};

TEST_P(TensorParallelBatchNorm, SeesAllMicrobatchesOfTheGroup) {
  for (const char* optimize : {"speed", "memory"}) {
    SCOPED_TRACE(optimize);
    check<Normalised>(GetParam(), optimize);
  }
  const auto weights = run_plain<Normalised>().weights;
  EXPECT_EQ(weights.at("norm.num_batches_tracked").item<int64_t>(), kSteps * kMicrobatches);
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorParallelBatchNorm,
                         ::testing::Values(TensorLayout{2}, TensorLayout{4}, TensorLayout{2, 2},
                                           TensorLayout{4, 2}, TensorLayout{2, 2, 1, true}));

/// Recomputed blocks send and add the same.
TEST(TensorParallelCheckpointing, ChangesNothing) {
  const auto plain = run_plain<Gpt>();
  for (const TensorLayout& layout : {TensorLayout{2}, TensorLayout{4, 2}}) {
    for (const char* optimize : {"speed", "memory"}) {
      SCOPED_TRACE(c10::str(layout, ", ", optimize));
      const auto again = run_on_ranks<Gpt>(
          layout,
          [](Gpt& net) {
            set_tensor_parallelism(net);
            for (const auto& block : net.blocks) set_activation_checkpointing(*block);
          },
          [&](Config config) { return config.optimize(optimize); });
      expect_divided<Gpt>(again);
      expect_same(again, run_marked<Gpt>(layout, optimize));
      expect_close(again, plain);
    }
  }
}

/// Forwards and backwards in other orders, and backwards in two halves, of which the second gathers
/// weights that the first one does not need.
TEST(TensorParallelSchedules, ChangeNothing) {
  const TensorLayout layout{2, 2};
  const auto expected = run_marked<Gpt>(layout);
  EXPECT_GT(divided_streams(expected.report), 0);
  for (const char* pipeline : {"simple", "1f1b", "zb_h1", "interleaved_1f1b", "zbv"}) {
    SCOPED_TRACE(pipeline);
    const auto got = run_on_ranks<Gpt>(
        layout, [](Gpt& net) { set_tensor_parallelism(net); },
        [&](Config config) { return config.optimize("memory").pipeline(pipeline); });
    expect_same(got, expected);
  }
}

/// The results of a step and of clipping for a rank.
struct Results {
  Tensors losses, predictions;
  torch::Tensor mean;
  std::vector<double> norms;
};

/// Ranks of a group get the same bits, whatever is summed over them.
TEST(TensorParallelResults, AreTheSameOnAllRanksOfAGroup) {
  const TensorLayout layout{4, 2, 1, true};
  std::map<int, Results> by_rank;
  std::mutex mutex;
  torch::set_num_threads(1);
  run_as_threads(layout.ranks(), config_of(layout), [&] {
    const auto net = make_model<WideMlp>(5);
    set_tensor_parallelism(*net);
    ModelOf<WideMlp> model(net);
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), kOptions);
    auto train = step([&](torch::Tensor x, torch::Tensor y) {
      const auto prediction = net->layers->forward(x);
      auto loss = kScale * torch::mse_loss(prediction, y);
      model->backward(loss);
      return std::make_tuple(loss, prediction);
    });
    Results results;
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      const auto batch = WideMlp::step_batch(i);
      const auto [loss, prediction] = train(batch[0], batch[1]);
      results.losses = loss.outputs();
      results.predictions = prediction.outputs();
      results.mean = loss.reduce_mean();
      for (const double type : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
        results.norms.push_back(clip_grad_norm_(model, kMaxNorm, type));
      }
      optimizer.step();
    }
    const std::lock_guard lock(mutex);
    by_rank[rank()] = results;
  });
  ASSERT_EQ(by_rank.size(), 8u);
  for (const auto& [rank, results] : by_rank) {
    SCOPED_TRACE(rank);
    EXPECT_EQ(results.losses.size(), static_cast<size_t>(kMicrobatches));
    expect_equal(results.losses, by_rank.at(0).losses, "loss");
    expect_equal(results.predictions, by_rank.at(0).predictions, "prediction");
    expect_equal(results.mean, by_rank.at(0).mean, "mean loss");
    EXPECT_EQ(results.norms, by_rank.at(0).norms);
  }
  EXPECT_GT(by_rank.at(0).norms[0], kMaxNorm);
}

}  // namespace
}  // namespace smp
