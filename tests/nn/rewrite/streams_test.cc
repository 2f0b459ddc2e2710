// SPDX-License-Identifier: Apache-2.0
// Activations between divided layers in parts (`DivideOptions::residual_streams`): which, along
// which dimension, by which operators, and the kept and moved bytes.

#include "tests/nn/rewrite/streams.h"

#include <ATen/autocast_mode.h>

namespace smp::nn::rewrite::testing {
namespace {

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
  ASSERT_FALSE(whole.residual_streams.empty());
  for (const ResidualStreamDecision& stream : whole.residual_streams) {
    EXPECT_EQ(stream.dim, -1);
    EXPECT_EQ(stream.why_whole, "no dimension before its last can be divided among 2 ranks");
  }
  EXPECT_EQ(whole.kept_bytes, whole.kept_bytes_with_whole_streams);
  EXPECT_EQ(count(whole.graph, "smp::tp_reduce"), 1);
}

TEST(StreamsTest, StayWholeUnlessAskedFor) {
  const DividedGraph divided =
      divided_net_with([](DivideOptions& options) { options.residual_streams = false; });
  EXPECT_TRUE(divided.residual_streams.empty());
  EXPECT_EQ(count(divided.graph, "smp::tp_reduce"), 1);
  EXPECT_EQ(report(divided).find("activations between"), std::string::npos);
  EXPECT_EQ(divided.kept_bytes, divided.kept_bytes_with_whole_streams);
}

/// The bytes that a rank need not keep have to be worth the additional messages.
TEST(StreamsTest, PricesDecide) {
  const auto with = [](double price) {
    return divided_net_with([&](DivideOptions& options) {
      options.insist = true;
      options.latency_us = 1000;
      options.activation_us_per_byte = price;
    });
  };
  const DividedGraph whole = with(0.2);
  ASSERT_EQ(dims(whole), std::string(whole.residual_streams.size(), '-'));
  const std::string& reason = whole.residual_streams.at(0).why_whole.value();
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

/// Inserted operators run in the modes of those that need them.
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
    const auto& got = divided.graph.values[divided.map.values[v].at(0)];
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

}  // namespace
}  // namespace smp::nn::rewrite::testing
