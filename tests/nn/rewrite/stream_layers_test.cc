// SPDX-License-Identifier: Apache-2.0
// Activations in parts between layers of many kinds.

#include "tests/nn/rewrite/streams.h"
#include "tests/zoo/models_convolutional.h"

namespace smp::nn::rewrite::testing {
namespace {

/// Projections apart: each gathers its input, twice, and no rank keeps it whole.
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

TEST(StreamsOfLayers, EachProjectionGathersItsInput) {
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

/// Streams of two dimensions: `addmm` with its bias, and ones that end where the next one begins.
TEST(StreamsOfLayers, Perceptrons) {
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

/// A bias that is one number for the columns of all ranks is not cut with the weight, as layers
/// that gather their input themselves need it.
TEST(StreamsOfLayers, BiasOfOneElement) {
  torch::manual_seed(1);
  torch::nn::Module net;
  const auto add = [&](const char* name, std::vector<int64_t> sizes) {
    return net.register_parameter(name, torch::randn(sizes, torch::kDouble));
  };
  const Tensor in = add("in", {6, 16}), narrow = add("narrow", {16, 8}),
               wide = add("wide", {8, 16});
  const Tensor out = add("out", {16, 4}), bias = add("bias", {1});
  for (int ranks : {2, 4}) {
    const DividedGraph divided = divided_as_plain(
        net, {torch::randn({8, 6}, torch::kDouble)},
        [&](const Tensors& x) -> Tensors {
          const auto y = torch::tanh(x[0].mm(in).relu().mm(narrow));
          return {torch::addmm(bias, y, wide).sin().mm(out).square().mean()};
        },
        ranks);
    EXPECT_EQ(divided.parameters.count("wide"), 1u) << report(divided);
    EXPECT_EQ(count(divided.graph, "smp::tp_reduce_scatter"), 1) << divided.graph.to_string();
    EXPECT_EQ(count(divided.graph, "smp::tp_gathered_linear"), 0) << divided.graph.to_string();
  }
}

/// `aten::linear` with a bias, and a residual that is added in place.
TEST(StreamsOfLayers, SumsInPlace) {
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

/// Convolutions whose channels are divided: their sums go to samples, past a skip that is joined to
/// them along channels.
TEST(StreamsOfLayers, ConvolutionsWithSkips) {
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
TEST(StreamsOfLayers, Encoders) {
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

TEST(StreamsOfLayers, VisionTransformer) {
  torch::manual_seed(1);
  stranger::VisionTransformerImpl net(4);
  net.to(torch::kDouble);
  const DividedGraph divided = divided_as_plain(
      net, {torch::randn({4, 3, 8, 8}, torch::kDouble), torch::randint(4, {4})},
      [&](const Tensors& in) -> Tensors { return {F::cross_entropy(net.forward(in[0]), in[1])}; },
      2);
  EXPECT_NE(dims(divided).find('0'), std::string::npos) << report(divided);
}

}  // namespace
}  // namespace smp::nn::rewrite::testing
