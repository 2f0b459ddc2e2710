// SPDX-License-Identifier: Apache-2.0
// Leaf modules that write their buffers and parameters.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>

#include "tests/smp/oracle.h"
#include "tests/smp/parity.h"

namespace smp::testing {
namespace {

constexpr int64_t kWidth = 6;

torch::nn::Linear linear() { return torch::nn::Linear(kWidth, kWidth); }

/// Takes its shift from the first data that it is given.
struct ActNormImpl : torch::nn::Module {
  ActNormImpl() {
    shift = register_buffer("shift", torch::zeros({kWidth}));
    ready = register_buffer("ready", torch::zeros({}));
    scale = register_parameter("scale", torch::rand({kWidth}));
  }
  torch::Tensor forward(torch::Tensor x) {
    if (ready.item<float>() == 0) {
      torch::NoGradGuard no_grad;
      shift.copy_(x.mean(0));
      ready.fill_(1);
    }
    return (x - shift) * scale;
  }
  torch::Tensor shift, ready, scale;
};
TORCH_MODULE(ActNorm);

struct NormalisedImpl : torch::nn::Module {
  NormalisedImpl() {
    in = register_module("in", linear());
    norm = register_module("norm", ActNorm());
    middle = register_module("middle", linear());
    last = register_module("last", ActNorm());
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    x = torch::tanh(leaf(norm)(torch::tanh(in(x))));
    return (leaf(last)(middle(x)) - y).pow(2).mean();
  }
  static Tensors batch(int64_t size) {
    return {torch::randn({size, kWidth}), torch::randn({size, kWidth})};
  }
  torch::nn::Linear in{nullptr}, middle{nullptr};
  ActNorm norm{nullptr}, last{nullptr};
};
TORCH_MODULE(Normalised);

/// A rank that does not run a leaf has the buffers with which it began.
TEST(LeafBuffers, MayBeInitialisedByTheFirstBatch) {
  torch::set_num_threads(1);
  for (const int stages : {1, 2}) {
    parity::check<Normalised, torch::optim::SGD>(
        {stages, 1, 2, "interleaved"}, [] { return Normalised(); }, torch::optim::SGDOptions(0.1));
  }
}

/// libtorch's BatchNorm with a cumulative average, which reads the number of batches in `forward`.
struct AveragedImpl : torch::nn::Module {
  explicit AveragedImpl(bool is_leaf = true) : opaque(is_leaf) {
    in = register_module("in", linear());
    norm = register_module(
        "norm", torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(kWidth).momentum(std::nullopt)));
    out = register_module("out", linear());
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    x = in(x);
    x = opaque ? leaf(norm)(x) : norm(x);
    return (out(torch::tanh(x)) - y).pow(2).mean();
  }
  static Tensors batch(int64_t size) {
    return {torch::randn({size, kWidth}), torch::randn({size, kWidth})};
  }
  bool opaque;
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Averaged);

TEST(CumulativeAverage, OfALeafHasTheBitsOfOneProcess) {
  torch::set_num_threads(1);
  for (const parity::Layout& layout :
       {parity::Layout{1, 1, 2, "simple"}, parity::Layout{2, 1, 3, "interleaved"},
        parity::Layout{3, 1, 4, "zb_h1"}, parity::Layout{2, 2, 2, "interleaved"}}) {
    SCOPED_TRACE(::testing::Message() << layout);
    parity::check<Averaged, torch::optim::SGD>(
        layout, [] { return Averaged(); }, torch::optim::SGDOptions(0.1));
  }
}

TEST(CumulativeAverage, GoesOnFromACheckpoint) {
  const Named plain =
      parity::check_resumed<Averaged, torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  EXPECT_EQ(plain.at("norm.num_batches_tracked").item<int64_t>(), 8);
}

TEST(CumulativeAverage, IsRefusedElsewhere) {
  for (const int ranks : {1, 2}) {
    const std::string text = error_of_run<CaptureError>(ranks, stages(ranks), [&] {
      Averaged net(/*is_leaf=*/false);
      DistributedModel<Averaged> model(net);
      const auto zeros = torch::zeros({4, kWidth});
      step([&](torch::Tensor x) { model->backward(net->loss(x, x)); })(zeros);
    });
    expect_has(text,
               {"buffer \"norm.num_batches_tracked\" is read on the host, as BatchNorm without a "
                "momentum does to average by the number of batches",
                "Give it a momentum (BatchNorm1dOptions(n).momentum(0.1)), or make it a leaf, "
                "which each microbatch calls: smp::leaf(norm)(x)"});
  }
}

/// Keeps its weight's rows short, by the data of the first layer's weight only.
struct ClampedImpl : torch::nn::Module {
  ClampedImpl() {
    fc = register_module("fc", linear());
    count = register_buffer("count", torch::zeros({}));
  }
  torch::Tensor forward(torch::Tensor x) {
    {
      torch::NoGradGuard no_grad;
      fc->weight.mul_(0.75).clamp_(-0.3, 0.3);
      if (is_training()) count += 1;
    }
    return torch::tanh(fc(x)) + (x * fc->weight[0]).pow(2);
  }
  torch::nn::Linear fc{nullptr};
  torch::Tensor count;
};
TORCH_MODULE(Clamped);

struct ClampedNetImpl : torch::nn::Module {
  ClampedNetImpl() {
    in = register_module("in", linear());
    clamped = register_module("clamped", Clamped());
    out = register_module("out", linear());
  }
  torch::Tensor loss(torch::Tensor x, torch::Tensor y) {
    auto inner = leaf(clamped, LeafWrites::kParameters);
    return (out(inner(torch::tanh(inner(torch::tanh(in(x)))))) - y).pow(2).mean();
  }
  static Tensors batch(int64_t size) {
    return {torch::randn({size, kWidth}), torch::randn({size, kWidth})};
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
  Clamped clamped{nullptr};
};
TORCH_MODULE(ClampedNet);

/// Each microbatch writes the weight that the backward of others, which come later, has used.
TEST(LeafParameters, MayBeWrittenInForward) {
  torch::set_num_threads(1);
  for (const parity::Layout& layout :
       {parity::Layout{1, 1, 1, "simple"}, parity::Layout{1, 1, 3, "simple"},
        parity::Layout{2, 1, 3, "interleaved"}, parity::Layout{3, 1, 4, "zb_h1"}}) {
    SCOPED_TRACE(::testing::Message() << layout);
    parity::check<ClampedNet, torch::optim::SGD>(
        layout, [] { return ClampedNet(); }, torch::optim::SGDOptions(0.1));
  }
}

TEST(LeafParameters, AreRefusedWhereAWriteWouldBeLost) {
  const auto text = [](Config config, bool reads, int ranks = 1) {
    return error_of_run<c10::Error>(ranks, config.microbatches(2), [&] {
      ClampedNet net;
      DistributedModel<ClampedNet> model(net);
      auto train = step([&](torch::Tensor x) {
        auto loss = net->loss(x, x);
        if (reads) loss = loss + net->clamped->fc->weight.sum();
        model->backward(loss);
      });
      train(torch::randn({4, kWidth}, net->in->weight.options().requires_grad(false)));
    });
  };
  expect_has(text(Config(), true),
             {"leaf module \"",
              "ClampedImpl\" writes parameter \"clamped.fc.weight\", and operator "
              "aten::sum reads it",
              "Let leaves only read it"});
  expect_has(text(Config().bf16(true), false),
             {"writes parameter \"clamped.fc.weight\", which has a master weight of float32. Train "
              "in float32, or call a module that only reads its parameters"});
  expect_has(text(Config().ddp(true).sharded_data_parallel_degree(2), false, 2),
             {"writes parameter \"clamped.fc.weight\", which replicas divide. Set "
              "\"sharded_data_parallel_degree\" to 1"});
}

}  // namespace
}  // namespace smp::testing
