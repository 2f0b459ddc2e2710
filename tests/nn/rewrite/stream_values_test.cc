// SPDX-License-Identifier: Apache-2.0
// Values that meet activations in parts, and memory that is written in several ways.

#include "tests/nn/rewrite/streams.h"

namespace smp::nn::rewrite::testing {
namespace {

/// Two divided layers of width 8 behind one that is not marked, and one before the loss.
struct BetweenImpl : torch::nn::Module {
  BetweenImpl() {
    in = register_module("in", torch::nn::Linear(8, 8));
    up = register_module("up", torch::nn::Linear(8, 16));
    down = register_module("down", torch::nn::Linear(16, 8));
    to(torch::kDouble);
  }
  /// `aten::linear` with a bias.
  Tensor block(const Tensor& x) {
    return torch::linear(torch::relu(torch::linear(x, up->weight, up->bias)), down->weight,
                         down->bias);
  }
  /// Options under which values not named in `whole` may be divided.
  DivideOptions options(const std::vector<std::string>& whole = {}) {
    DivideOptions options = memory_options(table_of(*this), 2);
    options.allowed.erase("in.weight");
    options.allowed.erase("in.bias");
    for (const std::string& name : whole) options.allowed.erase(name);
    return options;
  }
  torch::nn::Linear in{nullptr}, up{nullptr}, down{nullptr};
};

/// Host data that a stream meets takes other values with every step.
TEST(StreamsAndValues, LiteralsFollow) {
  torch::manual_seed(1);
  BetweenImpl net;
  std::vector<double> data(32, 0.5);
  const Tensors in = {torch::randn({4, 8}, torch::kDouble)};
  const Function step = training([&](const Tensors& x) -> Tensors {
    const Tensor y =
        torch::tanh(net.in(x[0])) + torch::sin(torch::tensor(data, torch::kDouble).view({4, 8}));
    return {net.block(y).square().sum()};
  });
  const TensorTable table = table_of(net);
  const auto whole = capture(table, in, step);
  DividedGraph divided = divide(*whole, net.options());
  EXPECT_EQ(dims(divided), "0") << report(divided);
  std::iota(data.begin(), data.end(), 0.25);
  int literals = 0;
  for (size_t v = 0; v < whole->values.size(); ++v) {
    if (whole->values[v].kind != graph::ValueKind::kLiteral) continue;
    ++literals;
    const auto id = static_cast<graph::ValueId>(v);
    for (const auto& change : divided.map.contents({{id, torch::tensor(data, torch::kDouble)}})) {
      ASSERT_TRUE(divided.graph.values[change.value].content.defined())
          << divided.graph.to_string();
      divided.graph.values[change.value].content = change.content;
    }
  }
  EXPECT_EQ(literals, 1);
  EXPECT_NE(divided.graph.to_string().find("aten::to.dtype_layout"), std::string::npos);
  EXPECT_EQ(count(divided.graph, "smp::tp_scatter"), 2) << divided.graph.to_string();

  expect_equals_plain(divided, net, table, in, step, 2);
}

/// A value that is joined to a stream goes its way, wherever it stands among the joined.
TEST(StreamsAndValues, JoinedAsTheStreamIs) {
  torch::manual_seed(1);
  BetweenImpl net;
  for (const bool stream_first : {false, true}) {
    const DividedGraph divided = divided_as_plain(
        net, {torch::randn({4, 8}, torch::kDouble)},
        [&](const Tensors& in) -> Tensors {
          const Tensor x = torch::tanh(net.in(in[0]));
          const Tensor wide = torch::linear(x, net.up->weight, net.up->bias);
          const Tensor y = x + torch::linear(torch::relu(wide), net.down->weight, net.down->bias);
          const Tensor both = torch::cat(stream_first ? Tensors{y, wide} : Tensors{wide, y}, -1);
          return {torch::tanh(both).square().sum()};
        },
        net.options());
    EXPECT_EQ(dims(divided), "0") << report(divided);
    const auto& operators = divided.graph.operators;
    const auto cat = std::find_if(operators.begin(), operators.end(),
                                  [](const auto& op) { return op.name() == "aten::cat"; });
    ASSERT_NE(cat, operators.end());
    EXPECT_EQ(c10::IntArrayRef(divided.graph.values[cat->results[0]].meta.sizes),
              c10::IntArrayRef({2, 24}))
        << divided.graph.to_string();
  }
}

/// How often an index occurs is known where all of them are.
TEST(StreamsAndValues, IndicesAreJoinedForGradientsByFrequency) {
  torch::manual_seed(1);
  BetweenImpl net;
  const Tensor codes = net.register_parameter("codes", torch::randn({3, 8}, torch::kDouble));
  const Tensor table = net.register_parameter("table", torch::randn({3, 8}, torch::kDouble));
  for (const bool by_frequency : {true, false}) {
    const DividedGraph divided = divided_as_plain(
        net, {torch::randn({4, 3, 8}, torch::kDouble)},
        [&](const Tensors& in) -> Tensors {
          const Tensor x = torch::tanh(net.in(in[0]));
          const Tensor y = x + net.block(x);
          const Tensor nearest = (y.unsqueeze(2) - codes).square().sum(-1).argmin(-1);
          const Tensor rows = torch::embedding(table, nearest, -1, by_frequency);
          return {net.block(y + rows).square().sum()};
        },
        net.options({"codes", "table"}));
    EXPECT_NE(dims(divided).find('0'), std::string::npos) << report(divided);
    for (size_t i = 0; i < divided.graph.operators.size(); ++i) {
      if (divided.graph.operators[i].name() != "aten::embedding") continue;
      const std::string line = divided.graph.line(i);
      const char* sizes = by_frequency ? "f64[4, 3, 8]" : "f64[2, 3, 8]";
      EXPECT_NE(line.find(sizes), std::string::npos) << line;
    }
  }
}

/// A value that lies in memory otherwise than its parts would, and is written through a view.
TEST(StreamsAndValues, WritesThroughViewsOfOtherStrides) {
  torch::manual_seed(1);
  BetweenImpl net;
  const Tensor slope = net.register_parameter("slope", torch::full({1}, 0.3, torch::kDouble));
  const DividedGraph divided = divided_as_plain(
      net, {torch::randn({4, 4, 8}, torch::kDouble)},
      [&](const Tensors& in) -> Tensors {
        const Tensor x = torch::prelu(net.in(in[0]).transpose(0, 1), slope) * 1.5;
        Tensor flat = x.transpose(0, 1).view({-1, 8});
        torch::sigmoid_(flat);
        return {net.block(x).square().sum()};
      },
      net.options({"slope"}));
  EXPECT_EQ(count(divided.graph, "aten::sigmoid_"), 1) << divided.graph.to_string();
}

/// However many layers add their input to their result, the whole chain is one stream.
TEST(StreamsAndValues, ManySumsInPlace) {
  torch::manual_seed(1);
  BetweenImpl net;
  const DividedGraph divided = divided_as_plain(
      net, {torch::randn({2, 4, 8}, torch::kDouble)},
      [&](const Tensors& in) -> Tensors {
        Tensor y = torch::tanh(net.in(in[0]));
        for (int i = 0; i < 12; ++i) {
          Tensor z = net.block(y);
          z += y;
          y = torch::tanh(z);
        }
        return {y.square().sum()};
      },
      net.options());
  EXPECT_EQ(dims(divided), "0") << report(divided);
  EXPECT_EQ(divided.residual_streams.at(0).alike, 1);
  EXPECT_EQ(count(divided.graph, "smp::tp_gathered_linear"), 12) << divided.graph.to_string();
  EXPECT_EQ(count(divided.graph, "smp::tp_reduce_scatter"), 12);
  EXPECT_EQ(count(divided.graph, "smp::tp_gather"), 0);
}

/// A sum over the ranks that is written along the divided dimension stays whole, and it alone.
TEST(StreamsAndValues, SumsThatMustStayWholeAreCut) {
  torch::manual_seed(1);
  BetweenImpl net;
  const DividedGraph divided = divided_as_plain(
      net, {torch::randn({3, 4, 8}, torch::kDouble)},
      [&](const Tensors& in) -> Tensors {
        const Tensor x = torch::tanh(net.in(in[0]));
        const Tensor y = x + net.block(x);
        const Tensor z = net.block(torch::tanh(y));
        z.select(1, 0).zero_();
        return {net.block(y + z).square().sum()};
      },
      net.options());
  EXPECT_EQ(dims(divided), "1-1") << report(divided);
  EXPECT_EQ(count(divided.graph, "smp::tp_reduce_scatter"), 2) << divided.graph.to_string();
  EXPECT_EQ(divided.parameters.count("down.weight"), 1u) << report(divided);
  for (const auto& op : divided.graph.operators) {
    if (op.name() != "smp::tp_gather") continue;
    const auto& joined = divided.graph.values[op.arguments[0].values[0]];
    EXPECT_NE(joined.kind, graph::ValueKind::kParameter) << divided.graph.to_string();
  }
}

/// Whole values that enter a divided region are not copied, unless they are written afterwards.
TEST(StreamsAndValues, WholeWeightsAreShared) {
  torch::manual_seed(1);
  BetweenImpl net;
  const DividedGraph divided = divided_as_plain(
      net, {torch::randn({4, 3, 8}, torch::kDouble)},
      [&](const Tensors& in) -> Tensors {
        const Tensor x = torch::tanh(net.in(in[0]));
        const Tensor y = torch::linear(x + net.block(x), net.in->weight);  // whole, on the stream
        return {net.block(y).square().sum()};
      },
      net.options());
  EXPECT_EQ(dims(divided), "0") << report(divided);
  EXPECT_EQ(count(divided.graph, "aten::clone"), 0) << divided.graph.to_string();
  int copies = 0;
  for (const auto& op : divided.graph.operators) {
    if (op.name() != "smp::tp_copy") continue;
    ++copies;
    const auto& values = divided.graph.values;
    EXPECT_EQ(values[op.results[0]].alias_set, values[op.arguments[0].values[0]].alias_set);
    EXPECT_EQ(op.cost.output_bytes, 0);
  }
  EXPECT_GE(copies, 1) << divided.graph.to_string();
}

/// A value that is read in a divided region and written behind it.
TEST(StreamsAndValues, WhatIsWrittenLaterIsCopied) {
  torch::manual_seed(1);
  BetweenImpl net;
  DivideOptions options = net.options();
  options.residual_streams = false;
  const DividedGraph divided = divided_as_plain(
      net, {torch::randn({4, 3, 8}, torch::kDouble)},
      [&](const Tensors& in) -> Tensors {
        Tensor x = net.in(in[0]);
        const Tensor y = torch::linear(x, net.up->weight.detach());  // keeps no `x`
        x.mul_(2);
        return {net.block(x).sum() + y.square().sum()};
      },
      options);
  EXPECT_EQ(count(divided.graph, "aten::clone"), 1) << divided.graph.to_string();
}

/// Parameters keep their layouts, streams do not: one that is added to a stream is cut.
TEST(StreamsAndValues, ParametersAreNotDividedForStreams) {
  torch::manual_seed(1);
  BetweenImpl net;
  const Tensor positions = net.register_parameter("positions", torch::rand({4, 8}, torch::kDouble));
  const DividedGraph divided = divided_as_plain(
      net, {torch::randn({3, 4, 8}, torch::kDouble)},
      [&](const Tensors& in) -> Tensors {
        const Tensor x = torch::tanh(net.in(in[0]));
        return {net.block(x + net.block(x) + positions).square().sum()};
      },
      net.options());
  EXPECT_EQ(dims(divided), "1") << report(divided);
  EXPECT_EQ(divided.parameters.count("positions"), 0u) << report(divided);
  EXPECT_EQ(divided.parameters.count("up.bias"), 1u) << report(divided);
}

}  // namespace
}  // namespace smp::nn::rewrite::testing
