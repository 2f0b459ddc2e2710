// SPDX-License-Identifier: Apache-2.0
// Regions that run again in the backward pass: the bits of a plain run, and less memory until then.

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "graph/allocations.h"
#include "graph/checkpointed_segment.h"
#include "graph/intercept.h"
#include "graph/memory_layout.h"
#include "graph/offload_store.h"
#include "graph/saved_tensors.h"
#include "graph/split_backward.h"
#include "tests/graph/checkpointed.h"
#include "tests/graph/harness.h"
#include "tests/smp/models.h"

namespace smp::graph::testing {
namespace {

using smp::testing::TinyConvNet;
using smp::testing::TinyGpt;

/// Keeps everything, and counts.
class Counter final : public SavedTensorKeeper {
 public:
  size_t pack(const at::Tensor& tensor) override {
    kept.push_back(tensor.tensor_data());
    return kept.size() - 1;
  }
  at::Tensor unpack(size_t number) override {
    ++unpacked;
    return kept.at(number);
  }
  void release(size_t number) noexcept override {
    ++released;
    kept[number] = at::Tensor();
  }

  std::vector<at::Tensor> kept;
  int unpacked = 0, released = 0;
};

TEST(SavedTensors, AKeeperIsGivenWhatFunctionsSave) {
  const auto x = torch::randn({3, 4}).requires_grad_();
  const auto plain = torch::autograd::grad({(x.exp() * x).sum()}, {x})[0];
  const auto counter = std::make_shared<Counter>();
  torch::Tensor loss, elsewhere;
  {
    const SavedTensorScope scope(counter);
    loss = (x.exp() * x).sum();
    {
      const SavedTensorScope none(nullptr);
      x.exp();
    }
    std::thread([&] { elsewhere = x.exp().sum(); }).join();
  }
  x.exp();
  EXPECT_EQ(counter->kept.size(), 3u);  // exp its result, mul both factors
  EXPECT_EQ(counter->unpacked, 0);
  EXPECT_TRUE(torch::equal(torch::autograd::grad({loss}, {x})[0], plain));
  EXPECT_EQ(counter->unpacked, 3);
  EXPECT_EQ(counter->released, 3);
  EXPECT_TRUE(torch::equal(torch::autograd::grad({elsewhere}, {x})[0], x.exp()));
}

template <class Net>
void expect_eager_bits_of(Net net) {
  torch::manual_seed(3);
  const std::vector<Tensors> microbatches = {Net::ContainedType::batch(2),
                                             Net::ContainedType::batch(2)};
  expect_eager_bits(*net, microbatches, [&](const Tensors& inputs) -> Tensors {
    const auto loss = net->loss(inputs[0], inputs[1]);
    backward(loss);
    return {loss};
  });
}

TEST(CheckpointedSegment, GptWithDropoutHasTheBitsOfEagerCode) {
  torch::manual_seed(1);
  expect_eager_bits_of(TinyGpt(/*tied=*/true));
}

TEST(CheckpointedSegment, ConvNetWithBatchNormHasTheBitsOfEagerCode) {
  torch::manual_seed(1);
  expect_eager_bits_of(TinyConvNet());
}

/// Views, writes through them, a loop that reads one tensor often, operators without gradients.
struct HardImpl : torch::nn::Module {
  HardImpl() {
    first = register_module("first", torch::nn::Linear(6, 12));
    second = register_module("second", torch::nn::Linear(4, 4));
    scale = register_buffer("scale", torch::ones({4}));
    frozen = register_parameter("frozen", torch::randn({4}), /*requires_grad=*/false);
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto parts = first(x).chunk(3, 1);
    auto y = parts[0] * parts[1].tanh() + parts[2] * frozen;
    {
      torch::NoGradGuard no_grad;
      scale.mul_(0.5).add_(y.abs().mean(0), 0.5);
    }
    auto z = y.clone();
    z.narrow(1, 1, 2).mul_(2.0);
    z.sigmoid_();
    for (int i = 0; i < 3; ++i) z = torch::dropout(second(z) + y, 0.3, true) * scale;
    return z.t().contiguous().square().sum();
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor scale, frozen;
};
TORCH_MODULE(Hard);

TEST(CheckpointedSegment, ViewsAndWritesHaveTheBitsOfEagerCode) {
  torch::manual_seed(1);
  Hard net;
  const std::vector<Tensors> microbatches = {{torch::randn({5, 6})}, {torch::randn({5, 6})}};
  expect_eager_bits(*net, microbatches, [&](const Tensors& inputs) -> Tensors {
    const auto loss = net->forward(inputs[0]);
    backward(loss);
    return {loss};
  });
}

TEST(CheckpointedSegment, WritesAfterBackwardHaveTheBitsOfEagerCode) {
  torch::manual_seed(1);
  Hard net;
  const std::vector<Tensors> microbatches = {{torch::randn({5, 6})}, {torch::randn({5, 6})}};
  expect_eager_bits(*net, microbatches, [&](const Tensors& inputs) -> Tensors {
    auto h = torch::exp(net->first(inputs[0]));
    auto part = h.narrow(1, 2, 4);
    auto y = torch::dropout(net->second(part * net->scale), 0.3, true);
    backward(y.square().sum());
    const torch::NoGradGuard no_grad;
    h.mul_(2).add_(part.sum());
    net->scale.mul_(0.5).add_(part.mean(0), 0.5);
    return {h, part, y};
  });
}

TEST(CheckpointedSegment, AutocastHasTheBitsOfEagerCode) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::GELU(), torch::nn::Linear(8, 8),
                            torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
  const std::vector<Tensors> microbatches = {{torch::randn({4, 8})}, {torch::randn({4, 8})}};
  expect_eager_bits(*net, microbatches, [&](const Tensors& inputs) -> Tensors {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    // The same weights twice in one scope: their gradients are added in bfloat16.
    auto y = net->forward(net->forward(inputs[0]));
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    const auto loss = y.to(torch::kFloat).square().mean();
    backward(loss);
    return {loss};
  });
}

/// Blocks of two layers, with names for their regions.
struct BlocksImpl : torch::nn::Module {
  explicit BlocksImpl(int count) {
    for (int i = 0; i < count; ++i) {
      up.push_back(
          register_module("up" + std::to_string(i), torch::nn::Linear(kWidth, 4 * kWidth)));
      down.push_back(
          register_module("down" + std::to_string(i), torch::nn::Linear(4 * kWidth, kWidth)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (size_t i = 0; i < up.size(); ++i) {
      x = x + torch::dropout(down[i](torch::gelu(up[i](x))), 0.1, true);
    }
    return x;
  }
  static constexpr int64_t kWidth = 32;
  std::vector<torch::nn::Linear> up, down;
};
TORCH_MODULE(Blocks);

constexpr int kBlocks = 4;
constexpr int64_t kRows = 64;

/// Captured, with a function that tells the block of each operator of the blocks.
struct BlockStep {
  BlockStep()
      : net(kBlocks),
        step(*net, {torch::randn({kRows, Blocks::ContainedType::kWidth})},
             [this](const Tensors& inputs) -> Tensors {
               const auto loss = net->forward(inputs[0]).square().mean();
               backward(loss);
               return {loss};
             }) {
    int block = -1;
    for (const Operator& op : step.graph().operators) {
      if (op.name() == "aten::linear" || op.name() == "aten::t" || op.name() == "aten::addmm") {
        const std::string scope = op.scope;
        block = scope.back() - '0';
      }
      if (op.name() == "aten::square") block = -1;
      block_of.push_back(block);
    }
  }
  Blocks net;
  Checkpointed step;
  std::vector<int> block_of;
};

TEST(CheckpointedSegment, KeepsTheInputsOfRegionsOnly) {
  torch::manual_seed(1);
  BlockStep blocks;
  const Tensors inputs = {torch::randn({kRows, BlocksImpl::kWidth})};
  const auto measure = [&](const std::function<int(int)>& region, int64_t& kept) {
    blocks.step.set_regions(region);
    const graph::Allocations allocations;
    auto run = blocks.step.forward(inputs, {});
    kept = allocations.now();
    auto gradients = Checkpointed::backward(run);
    gradients.clear();
    run = {};
    EXPECT_EQ(allocations.now(), 0);
    return allocations.peak();
  };
  int64_t kept_plain = 0, kept_regions = 0;
  const int64_t peak_plain = measure([](int) { return -1; }, kept_plain);
  const int64_t peak_regions =
      measure([&](int index) { return blocks.block_of[index]; }, kept_regions);
  // A block saves for its backward two tensors of 4 widths and a mask; its input is one width and
  // belongs to the caller for the first block. The last result and scalars are there as well.
  const int64_t width = kRows * BlocksImpl::kWidth * 4;
  EXPECT_GE(kept_plain, kBlocks * 9 * width);
  EXPECT_LE(kept_regions, kBlocks * width + 4096);
  EXPECT_LT(peak_regions, peak_plain - (kBlocks - 2) * 8 * width);
}

/// Counts calls of an operator.
class Calls final : public OperatorInterceptor {
 public:
  explicit Calls(std::string name) : name_(std::move(name)), scope_(*this) {}
  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    if (op.schema().name() == name_) ++count_;
    scope_.call_outer(op, stack);
  }
  int take() { return std::exchange(count_, 0); }

 private:
  const std::string name_;
  int count_ = 0;
  InterceptScope scope_;
};

TEST(CheckpointedSegment, RunsEachRegionAgainOncePerMicrobatchAndNoFurtherThanNeeded) {
  torch::manual_seed(1);
  BlockStep blocks;
  blocks.step.set_regions([&](int index) { return blocks.block_of[index]; });
  EXPECT_EQ(blocks.step.segment().regions(), static_cast<size_t>(kBlocks));
  const Tensors inputs = {torch::randn({kRows, BlocksImpl::kWidth})};
  for (const char* name : {"aten::gelu", "aten::dropout", "aten::add.Tensor"}) {
    Calls calls(std::string(name).substr(0, std::string(name).rfind('.')));
    auto a = blocks.step.forward(inputs, {});
    auto b = blocks.step.forward(inputs, {});
    const int forward = calls.take();
    EXPECT_EQ(forward, 2 * kBlocks) << name;
    Checkpointed::backward(a);
    const int backward = calls.take();
    // Nothing is saved after dropout, so the sum with the skip connection is not made again.
    EXPECT_EQ(backward, std::string(name) == "aten::add.Tensor" ? 0 : kBlocks) << name;
    Checkpointed::backward(b);
    EXPECT_EQ(calls.take(), backward) << name;
  }
}

TEST(CheckpointedSegment, RunsNothingAgainWhereAllThatIsSavedIsKeptAnyway) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::ReLU(), torch::nn::Linear(4, 4));
  Checkpointed step(*net, {torch::randn({3, 4})}, [&](const Tensors& inputs) -> Tensors {
    const auto loss = net->forward(inputs[0]).sum();
    backward(loss);
    return {loss};
  });
  // One region ends with relu, whose result it saves, and the next one reads that.
  int relu = 0;
  for (int index : step.operators()) {
    if (step.graph().operators[index].name() == "aten::relu") relu = index;
  }
  step.set_regions([&](int index) { return index <= relu ? 0 : 1; });
  auto run = step.forward({torch::randn({3, 4})}, {});
  Calls calls("aten::relu");
  Calls linear("aten::linear");
  Checkpointed::backward(run);
  EXPECT_EQ(calls.take(), 0);
  EXPECT_EQ(linear.take(), 0);
}

TEST(CheckpointedSegment, BackwardsUseTheConstantsOfTheirForward) {
  torch::manual_seed(1);
  torch::nn::Linear net(4, 4);
  double factor = 2.0;
  const auto function = [&](const Tensors& inputs) -> Tensors {
    const auto loss = (net(inputs[0]).exp() * factor).tanh().sum();
    backward(loss);
    return {loss};
  };
  const Tensors inputs = {torch::randn({3, 4})};
  Checkpointed step(*net, inputs, function);
  step.set_regions([](int) { return 0; });
  factor = 0.25;
  const TraceResult again =
      trace(table_of(*net), inputs, function, /*execute=*/false, {&step.graph()});
  ASSERT_EQ(again.constants.size(), 1u);
  const auto eager = [&](double used) {
    factor = used;
    net->zero_grad();
    function(inputs);
    return net->weight.grad().clone();
  };

  auto captured = step.forward(inputs, {});
  step.segment().apply(again.constants);
  auto changed = step.forward(inputs, {});
  EXPECT_TRUE(torch::equal(Checkpointed::backward(captured).at("weight"), eager(2.0)));
  EXPECT_TRUE(torch::equal(Checkpointed::backward(changed).at("weight"), eager(0.25)));
  auto later = step.forward(inputs, {});
  EXPECT_TRUE(torch::equal(Checkpointed::backward(later).at("weight"), eager(0.25)));
}

TEST(CheckpointedSegment, SplitBackwardsHaveTheBitsOfWholeOnes) {
  torch::manual_seed(1);
  BlockStep blocks;
  const Tensors inputs = {torch::randn({kRows, BlocksImpl::kWidth})};
  blocks.step.set_regions([](int) { return -1; });
  auto plain = blocks.step.forward(inputs, {});
  const auto expected = Checkpointed::backward(plain);
  blocks.step.set_regions([&](int index) { return blocks.block_of[index]; });
  auto run = blocks.step.forward(inputs, {});
  // The first block's weights stand for values from another stage.
  Calls calls("aten::gelu");
  const std::vector<GradientSinkPtr> first = {run.sinks.at("up0.weight")};
  std::unique_ptr<SplitBackward> split;
  {
    const auto starts = std::move(run.starts);
    split = std::make_unique<SplitBackward>(starts, run.gradients, first);
  }
  EXPECT_TRUE(torch::equal(first[0]->gradient, expected.at("up0.weight")));
  EXPECT_FALSE(run.sinks.at("down3.weight")->gradient.defined());
  split->run_weights();
  expect_equal(Checkpointed::gradients(run), expected, "gradient");
  EXPECT_EQ(calls.take(), kBlocks);
}

/// A store in memory that counts.
class CountingStore final : public TensorStore {
 public:
  std::shared_ptr<StoredTensor> put(const at::Tensor& tensor) override {
    ++puts;
    return std::make_shared<Stored>(*this, copy_as_laid_out(tensor));
  }
  int puts = 0, prefetches = 0, gets = 0;

 private:
  class Stored final : public StoredTensor {
   public:
    Stored(CountingStore& store, at::Tensor copy) : store_(store), copy_(std::move(copy)) {}
    void prefetch() override { ++store_.prefetches; }
    at::Tensor get() override {
      ++store_.gets;
      return copy_;
    }

   private:
    CountingStore& store_;
    at::Tensor copy_;
  };
};

TEST(CheckpointedSegment, PutsWhatItKeepsIntoAStore) {
  torch::manual_seed(1);
  BlockStep blocks;
  const Tensors inputs = {torch::randn({kRows, BlocksImpl::kWidth})};
  blocks.step.set_regions([](int) { return -1; });
  auto plain = blocks.step.forward(inputs, {});
  const auto expected = Checkpointed::backward(plain);
  blocks.step.set_regions([&](int index) { return blocks.block_of[index]; });
  CountingStore store;
  auto run = blocks.step.forward(inputs, {}, &store);
  EXPECT_EQ(store.puts, kBlocks - 1);  // the first block's input is the step's
  EXPECT_EQ(store.gets, 0);
  run.stored.prefetch();
  EXPECT_EQ(store.prefetches, kBlocks - 1);
  expect_equal(Checkpointed::backward(run), expected, "gradient");
  EXPECT_EQ(store.gets, kBlocks - 1);
}

/// Operators save lazy conjugates and negatives on memory that shows other numbers.
struct ConjugatesImpl : torch::nn::Module {
  ConjugatesImpl() {
    weight = register_parameter("weight", torch::randn({4}, torch::kComplexFloat));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto z = x * weight, y = z.conj() * (z * weight);
    const auto parts = torch::imag(z.conj()) * torch::real(z);
    return torch::view_as_real(y * z).square().sum() + parts.square().sum();
  }
  torch::Tensor weight;
};
TORCH_MODULE(Conjugates);

TEST(CheckpointedSegment, ConjugatesHaveTheBitsOfEagerCode) {
  torch::manual_seed(1);
  Conjugates net;
  const auto batch = [] { return Tensors{torch::randn({3, 4}, torch::kComplexFloat)}; };
  const Function function = [&](const Tensors& inputs) -> Tensors {
    const auto loss = net(inputs[0]);
    backward(loss);
    return {loss};
  };
  expect_eager_bits(*net, {batch(), batch()}, function);

  const Tensors inputs = batch();
  net->zero_grad();
  function(inputs);
  Checkpointed step(*net, inputs, function);
  for (int length = 1; length <= static_cast<int>(step.operators().size()); ++length) {
    step.set_regions_of(length);
    OffloadStore store;
    auto run = step.forward(inputs, {}, &store);
    store.wait();
    const auto gradient = Checkpointed::backward(run).at("weight");
    EXPECT_TRUE(torch::equal(gradient, net->weight.grad())) << length;
  }
}

TEST(CheckpointedSegment, RefusesRegionsThatCannotRunAgain) {
  torch::manual_seed(1);
  torch::nn::Linear net(4, 4);
  Checkpointed step(*net, {torch::randn({3, 4})}, [&](const Tensors& inputs) -> Tensors {
    auto y = net(inputs[0]);
    auto left = y.narrow(1, 0, 2), right = y.narrow(1, 1, 2);
    left.add_(1.0);
    const auto loss = (left * right).sum();
    backward(loss);
    return {loss};
  });
  std::vector<int> region;
  for (int index : step.operators()) {
    const bool write = !step.graph().operators[index].writes.empty();
    if (write || !region.empty()) region.push_back(index);
  }
  const std::string why = why_not_repeatable(step.graph(), {}, region).value();
  EXPECT_NE(why.find("writes in place a tensor of which 2 views come from outside"),
            std::string::npos)
      << why;
  try {
    step.set_regions([&](int index) { return index >= region.front() ? 0 : -1; });
    ADD_FAILURE() << "no error";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("cannot run again in the backward pass"), std::string::npos) << text;
    EXPECT_NE(text.find("Leave the module out"), std::string::npos) << text;
  }
}

TEST(CheckpointedSegment, RefusesSavedTensorsThatWereWrittenAsOneProcessDoes) {
  torch::manual_seed(1);
  torch::nn::Linear net(4, 4);
  const auto function = [&](const Tensors& inputs) -> Tensors {
    const auto y = net(inputs[0]).exp();
    const auto loss = y.add_(1.0).square().sum();  // exp has saved the tensor that add_ writes
    backward(loss);
    return {loss};
  };
  const Tensors inputs = {torch::randn({3, 4})};
  EXPECT_THROW(function(inputs), c10::Error);
  Checkpointed step(*net, inputs, function);
  step.set_regions([](int) { return 0; });
  auto run = step.forward(inputs, {});
  try {
    Checkpointed::backward(run);
    ADD_FAILURE() << "no error";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("saved for its backward was written in place afterwards"),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace smp::graph::testing
