// SPDX-License-Identifier: Apache-2.0
#include "graph/keyed_random.h"
#include "tests/graph/harness.h"

namespace smp::graph::testing {
namespace {

struct GuardedNetImpl : torch::nn::Module {
  torch::nn::Linear a{nullptr}, b{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  GuardedNetImpl() {
    a = register_module("a", torch::nn::Linear(6, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    b = register_module("b", torch::nn::Linear(8, 3));
    dropout = register_module("dropout", torch::nn::Dropout(0.5));
  }
  torch::Tensor forward(torch::Tensor x) { return b(dropout(torch::relu(norm(a(x))))); }
};
TORCH_MODULE(GuardedNet);

class Guard : public ::testing::Test {
 protected:
  Guard() : table_(make_table()) {
    for (auto& input : inputs_) input = input.contiguous();
  }

  TensorTable make_table() {
    torch::manual_seed(5);
    net_ = GuardedNet();
    return table_of(*net_);
  }

  Function function() {
    return [this](const Tensors& in) -> Tensors {
      auto x = in[0];
      for (int i = 0; i < repeats_; ++i) x = x * 1.5;
      auto logits = net_(x);
      auto weights = torch::tensor(class_weights_);
      auto loss = (logits * weights).pow(2).mean() * loss_weight_;
      backward(loss);
      return {loss};
    };
  }

  const Graph& capture() {
    first_ = trace(table_, inputs_, function());
    return *first_.recorded;
  }
  TraceResult again() { return trace(table_, inputs_, function(), false, {first_.recorded.get()}); }

  GuardedNet net_{nullptr};
  TensorTable table_;
  Tensors inputs_{torch::randn({4, 6})};
  double loss_weight_ = 1.0;
  int repeats_ = 1;
  std::vector<float> class_weights_{1, 2, 3};
  TraceResult first_;
};

TEST_F(Guard, TheSameFunctionMatches) {
  const Graph& graph = capture();
  const TraceResult result = again();
  EXPECT_EQ(result.match, &graph) << result.difference;
  EXPECT_TRUE(result.constants.empty());
  EXPECT_TRUE(result.contents.empty());
}

TEST_F(Guard, AChangedScalarIsPatched) {
  const Graph& graph = capture();
  loss_weight_ = 0.25;
  const TraceResult result = again();
  ASSERT_EQ(result.match, &graph) << result.difference;
  ASSERT_EQ(result.constants.size(), 1u);
  net_->dropout->options.p(0.25);
  EXPECT_EQ(again().constants.size(), 2u);
  const Tensors fresh{torch::randn({4, 6})};
  const auto replayed = replay(graph, table_, fresh, {}, again().constants);
  Tensors eager;
  {
    KeyedRandomScope random({});
    eager = function()(fresh);
  }
  EXPECT_TRUE(torch::equal(replayed.outputs[0], eager[0]));
}

TEST_F(Guard, TrainAndEvalAreTwoGraphs) {
  const Graph& graph = capture();
  net_->eval();
  const TraceResult eval = again();
  EXPECT_EQ(eval.match, nullptr);
  EXPECT_NE(eval.difference.find("aten::batch_norm"), std::string::npos) << eval.difference;
  net_->train();
  EXPECT_EQ(again().match, &graph);
}

TEST_F(Guard, ALoopOfAnotherLengthIsAnotherGraph) {
  const Graph& graph = capture();
  repeats_ = 3;
  const TraceResult longer = again();
  ASSERT_EQ(longer.match, nullptr);
  EXPECT_EQ(longer.recorded->operators.size(), graph.operators.size() + 2);
  // A third run finds either of them.
  const std::vector<const Graph*> both{&graph, longer.recorded.get()};
  EXPECT_EQ(trace(table_, inputs_, function(), false, both).match, longer.recorded.get());
  repeats_ = 1;
  EXPECT_EQ(trace(table_, inputs_, function(), false, both).match, &graph);
}

TEST_F(Guard, AChangedLiteralIsNoticed) {
  const Graph& graph = capture();
  class_weights_ = {3, 2, 1};
  const TraceResult result = again();
  ASSERT_EQ(result.match, &graph) << result.difference;
  ASSERT_EQ(result.contents.size(), 1u);
  EXPECT_TRUE(torch::equal(result.contents[0].content, torch::tensor(class_weights_)));
  class_weights_ = {1, 2};  // another shape: another graph, here one that cannot be broadcast
  EXPECT_THROW(again(), c10::Error);
}

TEST_F(Guard, OtherInputShapesAreAnotherGraph) {
  capture();
  inputs_ = {torch::randn({2, 6})};
  const TraceResult result = again();
  ASSERT_EQ(result.match, nullptr);
  EXPECT_EQ(result.difference,
            "input 0 is Float[2, 6] with strides [6, 1], and was Float[4, 6] with strides [6, 1]");
  EXPECT_EQ(result.recorded->values[0].meta.sizes[0], 2);
}

/// Kernels and views depend on them.
TEST_F(Guard, OtherInputStridesAreAnotherGraph) {
  capture();
  inputs_ = {torch::randn({6, 4}).t()};
  const TraceResult result = again();
  ASSERT_EQ(result.match, nullptr);
  EXPECT_EQ(result.difference,
            "input 0 is Float[4, 6] with strides [1, 4], and was Float[4, 6] with strides [6, 1]");
  inputs_ = {torch::randn({4, 6}), torch::randn({4, 6})};
  EXPECT_EQ(again().difference, "there are 2 input tensors, and were 1");
}

/// A recording on shapes equals one on data.
TEST_F(Guard, ShapeOnlyCaptureEqualsTheRealOne) {
  const Graph& real = capture();
  const TraceResult shapes = trace(table_, inputs_, function(), false);
  EXPECT_EQ(shapes.recorded->to_string(), real.to_string());
}

TEST_F(Guard, ShapeOnlyContinuationEqualsARealCapture) {
  capture();
  net_->eval();
  const TraceResult continued = again();
  const TraceResult real = trace(table_, inputs_, function());
  EXPECT_EQ(continued.recorded->to_string(), real.recorded->to_string());
  EXPECT_EQ(continued.recorded->fingerprint(), real.recorded->fingerprint());
}

TEST_F(Guard, ShapeOnlyRunsLeaveBuffersAndGeneratorsAlone) {
  capture();
  const auto mean = net_->norm->running_mean.clone();
  torch::manual_seed(9);
  const auto expected = torch::rand({3});
  torch::manual_seed(9);
  again();
  trace(table_, inputs_, function(), false);
  EXPECT_TRUE(torch::equal(net_->norm->running_mean, mean));
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected));
}

TEST_F(Guard, ReadingDataInAGuardedRunThrows) {
  capture();
  const auto reader = [&](const Tensors& in) -> Tensors {
    in[0].data_ptr<float>();
    return {};
  };
  try {
    trace(table_, inputs_, reader, false);
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("the data of a tensor of step function \"train\""),
              std::string::npos)
        << error.what();
  }
}

TEST_F(Guard, ShapesOfManyOperatorsAgreeWithRealRuns) {
  auto conv = torch::nn::Conv2d(2, 4, 3);
  const TensorTable table = table_of(*conv);
  const auto zoo = [&](const Tensors& in) -> Tensors {
    auto x = conv(in[0]);
    x = torch::relu(torch::layer_norm(x, {x.size(3)})) + x.flip({1}).roll(1, 2).abs();
    x = torch::adaptive_avg_pool2d(torch::upsample_bilinear2d(x, {8, 8}, false), {4, 4});
    auto q = x.flatten(2);
    x = torch::scaled_dot_product_attention(q, q, q);
    auto picked = x.index_select(1, torch::arange(2)).std({1}, true, true).logsumexp(2);
    auto wide = torch::where(x > 0, x, -x).transpose(1, 2).contiguous().masked_fill(x.mT() > 1, 0);
    auto loss = picked.sum() + wide.cumsum(1).mean() + torch::huber_loss(x, x.detach());
    backward(loss);
    return {loss, std::get<0>(wide.topk(2)), wide};
  };
  const Tensors inputs{torch::randn({2, 2, 9, 9})};
  const TraceResult real = trace(table, inputs, zoo);
  const TraceResult shapes = trace(table, inputs, zoo, false);
  EXPECT_EQ(shapes.recorded->to_string(), real.recorded->to_string());
}

/// A run forgets tensors without holders, of which there are thousands here. Those that the
/// function still holds, and their memory, stay known.
TEST_F(Guard, WhatTheFunctionHoldsIsKnownAfterThousandsOfOperators) {
  const auto long_function = [&](const Tensors& in) -> Tensors {
    const auto base = in[0] * 2;
    const auto view = base[1];
    auto x = in[0];
    for (int i = 0; i < 5000; ++i) x = x + 1;
    view.mul_(3);  // is seen by `base`
    auto loss = net_(x + base).sum();
    backward(loss);
    return {loss, base};
  };
  const TraceResult recorded = trace(table_, inputs_, long_function);
  const Graph& graph = *recorded.recorded;
  const TraceResult guarded = trace(table_, inputs_, long_function, false, {&graph});
  EXPECT_EQ(guarded.match, &graph) << guarded.difference;
  EXPECT_EQ(trace(table_, inputs_, long_function, false).recorded->to_string(), graph.to_string());
  const auto writer =
      std::find_if(graph.operators.begin(), graph.operators.end(),
                   [](const Operator& op) { return op.name() == "aten::mul_.Scalar"; });
  ASSERT_NE(writer, graph.operators.end()) << graph.to_string();
  ASSERT_EQ(writer->writes.size(), 1u);
  EXPECT_EQ(writer->writes[0], graph.values[graph.outputs[1]].alias_set);
}

/// A number that libtorch has wrapped into a tensor does not decide the type of a product.
TEST_F(Guard, AWrappedNumberDecidesNoTypeOnShapes) {
  const torch::Tensor count = torch::arange(4);
  const auto function = [](const Tensors& in) -> Tensors {
    torch::Tensor half = c10::scalar_to_tensor(0.5);
    half.unsafeGetTensorImpl()->set_wrapped_number(true);
    return {at::mul(in[0], half)};
  };
  for (const bool execute : {true, false}) {
    const TraceResult traced = trace(table_, {count}, function, execute);
    const Graph& graph = *traced.recorded;
    EXPECT_EQ(graph.values[graph.outputs[0]].meta.dtype, function({count})[0].scalar_type());
    const TraceResult same = trace(table_, {count}, function, false, {&graph});
    EXPECT_EQ(same.match, &graph) << same.difference;
  }
}

/// A tensor in the place of such a number decides the type, so it makes another graph.
TEST_F(Guard, AWrappedNumberIsNoOtherConstant) {
  at::Tensor factor = wrapped_number(0.5);
  const auto function = [&](const Tensors& in) -> Tensors { return {at::mul(in[0], factor)}; };
  const TraceResult first = trace(table_, {torch::arange(4)}, function, false);
  const Graph& graph = *first.recorded;
  factor = wrapped_number(0.25);
  const TraceResult other_number = trace(table_, {torch::arange(4)}, function, false, {&graph});
  EXPECT_EQ(other_number.match, &graph) << other_number.difference;
  factor = torch::tensor(0.5, torch::kDouble);
  const TraceResult tensor = trace(table_, {torch::arange(4)}, function, false, {&graph});
  ASSERT_EQ(tensor.match, nullptr);
  EXPECT_EQ(tensor.recorded->values[tensor.recorded->outputs[0]].meta.dtype, torch::kDouble);
}

}  // namespace
}  // namespace smp::graph::testing
