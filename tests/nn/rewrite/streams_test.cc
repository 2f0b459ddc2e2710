// SPDX-License-Identifier: Apache-2.0
// Activations between divided layers in parts (`DivideOptions::streams`): which, along which
// dimension, by which operators, and what that keeps and moves.

#include <ATen/autocast_mode.h>

#include "nn/rewrite/divide.h"
#include "tests/nn/rewrite/harness.h"
#include "tests/zoo/models_convolutional.h"

namespace smp::nn::rewrite::testing {
namespace {

using torch::Tensor;
namespace F = torch::nn::functional;

/// A residual block of two layers behind a norm, as in a transformer, between an embedding and a
/// vocabulary head.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    table = register_module("table", torch::nn::Embedding(8, 4));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    up = register_module("up", torch::nn::Linear(4, 8));
    down = register_module("down", torch::nn::Linear(8, 4));
    head = register_module("head", torch::nn::Linear(4, 8));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = table(ids);
    x = x + down(torch::relu(up(norm(x))));
    return head(x);
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
};

Function step_of(NetImpl& net) {
  return training([&net](const Tensors& in) -> Tensors {
    return {F::cross_entropy(net.forward(in[0]).flatten(0, 1), in[0].flatten())};
  });
}

Tensors ids(int64_t samples, int64_t length) {
  return {torch::arange(samples * length).view({samples, length}).remainder(8)};
}

/// A function on a module's parameters, divided with these options, after the divided graph was
/// found to give what one process does.
DividedGraph divided_as_plain(torch::nn::Module& module, const Tensors& inputs,
                              const Function& body, const DivideOptions& options) {
  const TensorTable table = table_of(module);
  const Function step = training(body);
  const auto whole = capture(table, inputs, step);
  DividedGraph divided = divide(*whole, options);
  expect_equals_plain(divided, module, table, inputs, step, options.ranks);
  expect_metas_hold(divided, table, inputs, options.ranks);
  return divided;
}

DividedGraph divided_as_plain(torch::nn::Module& module, const Tensors& inputs,
                              const Function& body, int ranks) {
  return divided_as_plain(module, inputs, body, memory_options(table_of(module), ranks));
}

DividedGraph divided_net(int64_t samples, int64_t length, int ranks = 2) {
  torch::manual_seed(2);
  NetImpl net;
  const Tensors in = ids(samples, length);
  return divided_as_plain(
      net, in,
      [&](const Tensors& x) -> Tensors {
        return {F::cross_entropy(net.forward(x[0]).flatten(0, 1), x[0].flatten())};
      },
      ranks);
}

/// The net with other options than `memory_options`.
DividedGraph divided_net_with(const std::function<void(DivideOptions&)>& change) {
  torch::manual_seed(2);
  NetImpl net;
  const TensorTable table = table_of(net);
  DivideOptions options = memory_options(table, 2);
  change(options);
  return divide(*capture(table, ids(2, 3), step_of(net)), options);
}

/// "dim" of each divided stream, "-" of each whole one.
std::string dims(const DividedGraph& divided) {
  std::string text;
  for (const StreamDecision& stream : divided.streams) {
    text += stream.dim < 0 ? "-" : std::to_string(stream.dim);
  }
  return text;
}

int count(const graph::Graph& graph, const std::string& name) {
  return static_cast<int>(std::count_if(graph.operators.begin(), graph.operators.end(),
                                        [&](const auto& op) { return op.name() == name; }));
}

TEST(StreamsTest, TextOfABlock) {
  EXPECT_EQ(divided_net(2, 3).graph.to_string(), R"(%0 = input 0 : i64[2, 3]
%1 = parameter table.weight : f64[8, 2] grad
%2 = parameter norm.weight : f64[4] grad
%3 = parameter norm.bias : f64[4] grad
%4 = parameter up.weight : f64[4, 4] grad
%5 = parameter up.bias : f64[4] grad
%6 = parameter down.weight : f64[4, 4] grad
%7 = parameter down.bias : f64[4] grad
%8 = parameter head.weight : f64[4, 4] grad
%9 = parameter head.bias : f64[4] grad
%10 = aten::embedding(weight=%1, indices=%0, padding_idx=-1, scale_grad_by_freq=false, sparse=false) : f64[2, 3, 2]  # table
%11 = smp::tp_all_to_all(x=%10, split_dim=0, join_dim=2) : f64[1, 3, 4]  # table
%12 = smp::tp_copy(x=%2) : f64[4]  # norm
%13 = smp::tp_copy(x=%3) : f64[4]  # norm
%14 = aten::layer_norm(input=%11, normalized_shape=[4], weight=%12, bias=%13, eps=$, cudnn_enable=true) : f64[1, 3, 4]  # norm
%15 = aten::t(self=%4) : f64[4, 4]{1, 4}  # up
%16 = aten::t(self=%15) : f64[4, 4]  # up
%17 = smp::tp_gathered_linear(x=%14, weight=%16, bias=None, dim=0) : f64[2, 3, 4]  # up
%18 = aten::add_.Tensor(self=%17, other=%5, alpha=$) : f64[2, 3, 4]  # up
%19 = aten::relu(self=%18) : f64[2, 3, 4]
%20 = aten::t(self=%6) : f64[4, 4]{1, 4}  # down
%21 = aten::matmul(self=%19, other=%20) : f64[2, 3, 4]  # down
%22 = smp::tp_reduce_scatter(x=%21, dim=0) : f64[1, 3, 4]  # down
%23 = smp::tp_copy(x=%7) : f64[4]  # down
%24 = aten::add_.Tensor(self=%22, other=%23, alpha=$) : f64[1, 3, 4]  # down
%25 = aten::add.Tensor(self=%11, other=%24, alpha=$) : f64[1, 3, 4]
%26 = aten::t(self=%8) : f64[4, 4]{1, 4}  # head
%27 = aten::t(self=%26) : f64[4, 4]  # head
%28 = smp::tp_gathered_linear(x=%25, weight=%27, bias=None, dim=0) : f64[2, 3, 4]  # head
%29 = aten::add_.Tensor(self=%28, other=%9, alpha=$) : f64[2, 3, 4]  # head
%30 = aten::flatten.using_ints(self=%29, start_dim=0, end_dim=1) : f64[6, 4]
%31 = aten::flatten.using_ints(self=%0, start_dim=0, end_dim=-1) : i64[6]
%32 = smp::tp_cross_entropy(logits=%30, target=%31, weight=None, reduction=1, ignore_index=-100, label_smoothing=$) : f64[]
backward %32
return %32
)");
}

/// Samples, or positions where the ranks cannot share the samples.
TEST(StreamsTest, GoAlongTheFirstDimensionThatRanksShare) {
  EXPECT_EQ(dims(divided_net(2, 3)), "0");
  EXPECT_EQ(dims(divided_net(3, 2)), "1");
  EXPECT_EQ(dims(divided_net(2, 4, 4)), "1");
  const DividedGraph whole = divided_net(3, 5);
  ASSERT_FALSE(whole.streams.empty());
  for (const StreamDecision& stream : whole.streams) {
    EXPECT_EQ(stream.dim, -1);
    EXPECT_EQ(stream.reason, "no dimension before its last can be divided among 2 ranks");
  }
  EXPECT_EQ(whole.kept_bytes, whole.kept_bytes_with_whole_streams);
  EXPECT_EQ(count(whole.graph, "smp::tp_reduce"), 1);
}

TEST(StreamsTest, StayWholeUnlessAskedFor) {
  const DividedGraph divided =
      divided_net_with([](DivideOptions& options) { options.streams = false; });
  EXPECT_TRUE(divided.streams.empty());
  EXPECT_EQ(count(divided.graph, "smp::tp_reduce"), 1);
  EXPECT_EQ(report(divided).find("activations between"), std::string::npos);
  EXPECT_EQ(divided.kept_bytes, divided.kept_bytes_with_whole_streams);
}

/// What a rank needs not keep has to be worth what is sent more often.
TEST(StreamsTest, PricesDecide) {
  const auto with = [](double price) {
    return divided_net_with([&](DivideOptions& options) {
      options.insist = true;
      options.latency_us = 1000;
      options.activation_us_per_byte = price;
    });
  };
  const DividedGraph whole = with(0.2);
  ASSERT_EQ(dims(whole), std::string(whole.streams.size(), '-'));
  const std::string& reason = whole.streams.at(0).reason;
  EXPECT_EQ(reason.rfind("in parts, a microbatch is predicted to take ", 0), 0u) << reason;
  EXPECT_NE(reason.find(" B of it instead of "), std::string::npos) << reason;
  EXPECT_NE(report(whole).find("whole: in parts, a microbatch is predicted to take "),
            std::string::npos);
  EXPECT_EQ(dims(with(1000)), "0");
}

/// The inputs of the norm and of two layers with divided weights, [2, 3, 4] in float64.
TEST(StreamsTest, KeepWhatTheFormulaSays) {
  const DividedGraph divided = divided_net(2, 3);
  EXPECT_EQ(divided.kept_bytes_with_whole_streams - divided.kept_bytes, 3 * (2 * 3 * 4 * 8) / 2);
  const std::string text = report(divided);
  for (const char* line :
       {"activations between divided layers  sizes      on a rank",
        "table to down                       [2, 3, 4]  [1, 3, 4]  divided along dimension 0",
        "Of a microbatch a rank keeps about 672 B of activations until its backward pass, 960 B "
        "with "
        "all between divided layers whole",
        "whole: operator aten::layer_norm needs all of it for each part of what it works on"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
  }
}

TEST(StreamsTest, SendWhatTheFormulaSays) {
  const DividedGraph divided = divided_net(2, 3);
  // Half of the 192 B of a value, once gathered or summed to parts; of gradients of the norm's two
  // parameters and of a bias, 32 B each, all goes both ways. Columns of the embedding become rows.
  const int64_t once = 192 / 2;
  EXPECT_EQ(divided.traffic.forward_calls, 5);  // the loss sums numbers of its own
  EXPECT_EQ(divided.traffic.forward_bytes,
            once / 2 + 3 * once + divided.traffic_of.at("").forward_bytes);
  EXPECT_EQ(divided.traffic.backward_bytes, once / 2 + 5 * once + 3 * 32);
}

/// Projections apart: each gathers its input, twice, and nobody keeps it whole.
struct ProjectionsImpl : torch::nn::Module {
  ProjectionsImpl() {
    for (const char* name : {"in", "q", "k", "v", "out"}) {
      layers.emplace(name, register_module(name, torch::nn::Linear(8, 8)));
    }
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& in) {
    const Tensor x = norm(layers.at("in")(in));
    const auto heads = [&](const char* name) {
      return layers.at(name)(x).view({x.size(0), x.size(1), 4, 2}).transpose(1, 2);
    };
    const auto mixed =
        torch::scaled_dot_product_attention(heads("q"), heads("k"), heads("v"), {}, 0.2);
    return x + layers.at("out")(mixed.transpose(1, 2).reshape(x.sizes()));
  }
  std::map<std::string, torch::nn::Linear> layers;
  torch::nn::LayerNorm norm{nullptr};
};

TEST(StreamsTest, EachProjectionGathersItsInput) {
  torch::manual_seed(3);
  ProjectionsImpl net;
  for (int ranks : {2, 4}) {
    const DividedGraph divided = divided_as_plain(
        net, {torch::randn({4, 3, 8}, torch::kDouble)},
        [&](const Tensors& in) -> Tensors { return {net.forward(in[0]).square().sum()}; }, ranks);
    EXPECT_EQ(count(divided.graph, "smp::tp_gathered_linear"), 3) << divided.graph.to_string();
    EXPECT_EQ(count(divided.graph, "smp::tp_all_gather"), 0);
    EXPECT_EQ(count(divided.graph, "smp::tp_reduce_scatter"), 1);
  }
}

/// Of two dimensions: `addmm` with its bias, and streams that end where the next one begins.
TEST(StreamsTest, Perceptrons) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(6, 16), torch::nn::ReLU(), torch::nn::Linear(16, 8),
                            torch::nn::Dropout(0.3), torch::nn::Tanh(), torch::nn::Linear(8, 16),
                            torch::nn::GELU(), torch::nn::Linear(16, 4));
  net->to(torch::kDouble);
  for (int ranks : {2, 4}) {
    const DividedGraph divided = divided_as_plain(
        *net, {torch::randn({8, 6}, torch::kDouble)},
        [&](const Tensors& in) -> Tensors {
          const auto out = net->forward(in[0]);
          return {out.square().mean(), out};
        },
        ranks);
    EXPECT_EQ(count(divided.graph, "smp::tp_reduce_scatter"), 2) << divided.graph.to_string();
    EXPECT_EQ(count(divided.graph, "smp::tp_gathered_linear"), 1) << divided.graph.to_string();
    EXPECT_EQ(count(divided.graph, "smp::tp_reduce"), 1);  // the loss
  }
}

/// `aten::linear` with a bias, and a residual that is added in place.
TEST(StreamsTest, SumsInPlace) {
  torch::manual_seed(1);
  torch::nn::Linear in(8, 8), up(8, 16), down(16, 8);
  torch::nn::Module net;
  net.register_module("in", in);
  net.register_module("up", up);
  net.register_module("down", down);
  net.to(torch::kDouble);
  DivideOptions options = memory_options(table_of(net), 2);
  options.allowed.erase("in.weight");
  options.allowed.erase("in.bias");
  const DividedGraph divided = divided_as_plain(
      net, {torch::randn({2, 4, 8}, torch::kDouble)},
      [&](const Tensors& x) -> Tensors {
        Tensor y = torch::tanh(in(x[0]));
        for (int i = 0; i < 2; ++i) {
          Tensor z = torch::linear(torch::relu(torch::linear(y, up->weight, up->bias)),
                                   down->weight, down->bias);
          z = torch::dropout(z, i == 0 ? 0.2 : 0.0, true);  // the second hands on its argument
          z += y;
          y = z;
        }
        return {y.square().sum()};
      },
      options);
  EXPECT_NE(dims(divided).find('0'), std::string::npos) << report(divided);
  EXPECT_EQ(count(divided.graph, "smp::tp_reduce"), 1) << divided.graph.to_string();  // the loss
  EXPECT_EQ(count(divided.graph, "smp::tp_gathered_linear"), 2);
  EXPECT_EQ(count(divided.graph, "smp::tp_reduce_scatter"), 2);
  EXPECT_EQ(count(divided.graph, "aten::dropout"), 1);
}

/// Masks are those of one process along whatever dimension the ranks have parts.
TEST(StreamsTest, DropTheSameElements) {
  for (int dim = 0; dim < 3; ++dim) {
    torch::manual_seed(1);
    torch::nn::Linear up(4, 8), down(8, 4), last(4, 8);
    torch::nn::Module net;
    net.register_module("up", up);
    net.register_module("down", down);
    net.register_module("last", last);
    net.to(torch::kDouble);
    std::vector<int64_t> sizes = {3, 5, 7, 4};
    sizes[dim] = 6;
    const DividedGraph divided = divided_as_plain(
        net, {torch::randn(sizes, torch::kDouble)},
        [&](const Tensors& x) -> Tensors {
          const Tensor y = torch::dropout(down(torch::relu(up(x[0]))), 0.4, true);
          return {last(y * y).square().sum(), y};
        },
        2);
    EXPECT_EQ(dims(divided).substr(0, 1), std::to_string(dim)) << report(divided);
    EXPECT_EQ(count(divided.graph, "smp::tp_dropout"), 1);
  }
}

/// Where an operator works along the divided dimension, it gets the whole.
TEST(StreamsTest, AreJoinedWhereOperatorsNeedThemWhole) {
  torch::manual_seed(2);
  NetImpl net;
  const DividedGraph divided = divided_as_plain(
      net, ids(2, 4),
      [&](const Tensors& in) -> Tensors {
        const Tensor x = net.table(in[0]);
        const Tensor y = x + net.down(torch::relu(net.up(net.norm(x))));
        const Tensor sorted = std::get<0>(y.flatten().sort());
        return {(sorted * torch::arange(32, torch::kDouble)).sum() + net.head(y).square().sum()};
      },
      2);
  EXPECT_EQ(dims(divided).substr(0, 1), "0") << report(divided);
  EXPECT_GE(count(divided.graph, "smp::tp_gather"), 1) << divided.graph.to_string();
}

/// Convolutions whose channels are divided: their sums go to samples, past a skip that is joined to
/// them along channels.
TEST(StreamsTest, ConvolutionsWithSkips) {
  torch::manual_seed(1);
  struct Net : torch::nn::Module {
    Net() {
      const auto conv = [](int64_t in, int64_t out) {
        return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1));
      };
      first = register_module("first", conv(2, 4));
      wide = register_module("wide", conv(4, 16));
      narrow = register_module("narrow", conv(16, 4));
      last = register_module("last", conv(8, 2));
      to(torch::kDouble);
    }
    Tensor forward(const Tensor& in) {
      const Tensor x = torch::gelu(first(in));
      const Tensor y = torch::dropout(torch::gelu(narrow(torch::gelu(wide(x)))), 0.2, true);
      return last(torch::cat({y, x}, 1));
    }
    torch::nn::Conv2d first{nullptr}, wide{nullptr}, narrow{nullptr}, last{nullptr};
  } net;
  DivideOptions options = memory_options(table_of(net), 2);
  for (const char* name : {"first", "last"}) {
    options.allowed.erase(std::string(name) + ".weight");
    options.allowed.erase(std::string(name) + ".bias");
  }
  const DividedGraph divided = divided_as_plain(
      net, {torch::randn({2, 2, 4, 4}, torch::kDouble)},
      [&](const Tensors& in) -> Tensors { return {net.forward(in[0]).square().mean()}; }, options);
  EXPECT_NE(dims(divided).find('0'), std::string::npos) << report(divided);
  EXPECT_EQ(count(divided.graph, "smp::tp_reduce_scatter"), 1) << divided.graph.to_string();
}

/// libtorch's layers, whose activations are [length, samples, channels], before and behind norms.
TEST(StreamsTest, Encoders) {
  torch::manual_seed(1);
  torch::nn::TransformerEncoder net(torch::nn::TransformerEncoderOptions(
      torch::nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(32).dropout(0.2), 2));
  net->to(torch::kDouble);
  for (const auto& [length, samples, ranks] :
       std::vector<std::tuple<int64_t, int64_t, int>>{{4, 3, 2}, {5, 2, 2}, {8, 2, 4}}) {
    const DividedGraph divided = divided_as_plain(
        *net, {torch::randn({length, samples, 16}, torch::kDouble)},
        [&](const Tensors& in) -> Tensors {
          const auto out = net->forward(in[0]);
          return {out.square().sum(), out};
        },
        ranks);
    EXPECT_EQ(dims(divided), length % ranks == 0 ? "0" : "1") << report(divided);
    EXPECT_EQ(count(divided.graph, "smp::tp_reduce"), 1) << divided.graph.to_string();
  }
}

TEST(StreamsTest, VisionTransformer) {
  torch::manual_seed(1);
  stranger::VisionTransformerImpl net(4);
  net.to(torch::kDouble);
  const DividedGraph divided = divided_as_plain(
      net, {torch::randn({4, 3, 8, 8}, torch::kDouble), torch::randint(4, {4})},
      [&](const Tensors& in) -> Tensors { return {F::cross_entropy(net.forward(in[0]), in[1])}; },
      2);
  EXPECT_NE(dims(divided).find('0'), std::string::npos) << report(divided);
}

/// What is inserted runs in the modes of what needs it.
TEST(StreamsTest, ModesAreKept) {
  torch::manual_seed(1);
  torch::nn::Linear up(4, 6), down(6, 4);
  torch::nn::Module net;
  net.register_module("up", up);
  net.register_module("down", down);
  const TensorTable table = table_of(net);
  const auto whole =
      capture(table, {torch::ones({2, 3, 4})}, training([&](const Tensors& in) -> Tensors {
                at::autocast::set_autocast_enabled(at::kCPU, true);
                Tensor x = in[0];
                for (int i = 0; i < 2; ++i) x = down(torch::relu(up(x)));
                at::autocast::clear_cache();
                at::autocast::set_autocast_enabled(at::kCPU, false);
                return {x.to(torch::kFloat).sum()};
              }));
  const DividedGraph divided = divide(*whole, memory_options(table, 2));
  for (const char* name : {"smp::tp_reduce_scatter", "smp::tp_gathered_linear"}) {
    ASSERT_GE(count(divided.graph, name), 1) << divided.graph.to_string();
  }
  for (size_t i = 0; i < divided.graph.operators.size(); ++i) {
    const std::string line = divided.graph.line(i);
    if (line.find("smp::tp_reduce_scatter") == std::string::npos &&
        line.find("smp::tp_gathered_linear") == std::string::npos) {
      continue;
    }
    EXPECT_NE(line.find("autocast_cpu(bf16)"), std::string::npos) << line;
    EXPECT_NE(line.find(": bf16["), std::string::npos) << line;
  }
  for (size_t v = 0; v < whole->values.size(); ++v) {
    const auto& got = divided.graph.values[divided.values[v].at(0)];
    EXPECT_EQ(got.meta.dtype, whole->values[v].meta.dtype) << divided.graph.to_string();
  }
}

/// Graphs of other lengths and without a backward pass keep the parameters' layouts, and choose
/// their own for activations.
TEST(StreamsTest, LaterGraphsChooseAnew) {
  torch::manual_seed(2);
  NetImpl net;
  DivideOptions options = memory_options(table_of(net), 2);
  options.fixed = divided_net(2, 3).parameters;
  const DividedGraph odd = divided_as_plain(
      net, ids(3, 4),
      [&](const Tensors& in) -> Tensors { return {net.forward(in[0]).square().sum()}; }, options);
  EXPECT_EQ(odd.parameters, options.fixed);
  EXPECT_EQ(dims(odd), "1");
  const TensorTable table = table_of(net);
  const Function evaluate = [&](const Tensors& in) -> Tensors { return {net.forward(in[0])}; };
  const DividedGraph evaluated = divide(*capture(table, ids(2, 4), evaluate), options);
  EXPECT_EQ(evaluated.kept_bytes, 0);
  expect_equals_plain(evaluated, net, table, ids(2, 4), evaluate, 2);
}

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
  /// What is not named in `whole` may be divided.
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
TEST(StreamsTest, LiteralsFollow) {
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
    for (const auto& change : divided.contents({{id, torch::tensor(data, torch::kDouble)}})) {
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

/// How often an index occurs is known where all of them are.
TEST(StreamsTest, IndicesAreJoinedForGradientsByFrequency) {
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
TEST(StreamsTest, WritesThroughViewsOfOtherStrides) {
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
TEST(StreamsTest, ManySumsInPlace) {
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
  EXPECT_EQ(divided.streams.at(0).streams, 1);
  EXPECT_EQ(count(divided.graph, "smp::tp_gathered_linear"), 12) << divided.graph.to_string();
  EXPECT_EQ(count(divided.graph, "smp::tp_reduce_scatter"), 12);
  EXPECT_EQ(count(divided.graph, "smp::tp_gather"), 0);
}

/// A sum over the ranks that is written along the divided dimension stays whole, and it alone.
TEST(StreamsTest, SumsThatMustStayWholeAreCut) {
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

/// What is whole and enters a divided region is not copied, unless it is written afterwards.
TEST(StreamsTest, WholeWeightsAreShared) {
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
TEST(StreamsTest, WhatIsWrittenLaterIsCopied) {
  torch::manual_seed(1);
  BetweenImpl net;
  DivideOptions options = net.options();
  options.streams = false;
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
TEST(StreamsTest, ParametersAreNotDividedForStreams) {
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
