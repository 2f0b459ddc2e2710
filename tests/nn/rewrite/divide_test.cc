// SPDX-License-Identifier: Apache-2.0
// The text of divided graphs, decisions and their reasons, the decisions that later graphs follow,
// and errors.

#include "nn/rewrite/divide.h"

#include <ATen/autocast_mode.h>

#include "graph/coalesce.h"
#include "graph/leaf.h"
#include "nn/rewrite/batch_axis.h"
#include "nn/rewrite/rule.h"
#include "tests/error_of.h"
#include "tests/nn/rewrite/harness.h"

namespace smp::nn::rewrite::testing {
namespace {

using smp::testing::error_of;
using torch::Tensor;

struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl(int64_t width, int64_t hidden) {
    up = register_module("up", torch::nn::Linear(width, hidden));
    down = register_module("down", torch::nn::Linear(hidden, width));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return down(torch::relu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};

Function step_of(TwoLayersImpl& net) {
  return training([&net](const Tensors& in) -> Tensors { return {net.forward(in[0]).sum()}; });
}

Tensors batch(int64_t width) { return {torch::ones({2, width}, torch::kDouble)}; }

struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(int64_t heads, double dropout = 0) : heads(heads), dropout(dropout) {
    qkv = register_module("qkv", torch::nn::Linear(4 * heads, 12 * heads));
    out = register_module("out", torch::nn::Linear(4 * heads, 4 * heads));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) {
    const auto parts = qkv(x).view({x.size(0), x.size(1), 3, heads, 4}).permute({2, 0, 3, 1, 4});
    const auto mixed =
        torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, dropout, true);
    return out(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), 4 * heads}));
  }
  int64_t heads;
  double dropout;
  torch::nn::Linear qkv{nullptr}, out{nullptr};
};

DividedGraph divided_attention(AttentionImpl& net, int ranks, bool trains = true) {
  const TensorTable table = table_of(net);
  const Function body = [&](const Tensors& in) -> Tensors { return {net.forward(in[0]).sum()}; };
  const auto whole = capture(table, {torch::ones({2, 3, 4 * net.heads}, torch::kDouble)},
                             trains ? training(body) : body);
  return divide(*whole, eager_options(table, ranks));
}

TEST(DivideTest, TextOfTwoLayers) {
  TwoLayersImpl net(4, 6);
  const TensorTable table = table_of(net);
  const auto whole = capture(table, batch(4), step_of(net));
  const DividedGraph divided = divide(*whole, eager_options(table, 2));
  EXPECT_EQ(divided.graph.to_string(), R"(%0 = input 0 : f64[2, 4]
%1 = parameter up.weight : f64[3, 4] grad
%2 = parameter up.bias : f64[3] grad
%3 = parameter down.weight : f64[4, 3] grad
%4 = parameter down.bias : f64[4] grad
%5 = aten::t(self=%1) : f64[4, 3]{1, 4}  # up
%6 = aten::addmm(self=%2, mat1=%0, mat2=%5, beta=$, alpha=$) : f64[2, 3]  # up
%7 = aten::relu(self=%6) : f64[2, 3]
%8 = aten::t(self=%3) : f64[3, 4]{1, 3}  # down
%9 = aten::mm(self=%7, mat2=%8) : f64[2, 4]  # down
%10 = smp::tp_reduce(x=%9) : f64[2, 4]  # down
%11 = aten::add.Tensor(self=%4, other=%10, alpha=$) : f64[2, 4]  # down
%12 = aten::sum(self=%11, dtype=None) : f64[]
backward %12
return %12
)");
  EXPECT_EQ(divided.map.operators.size(), whole->operators.size());
  EXPECT_EQ(divided.map.operators[0], std::vector<int>{0});
  // Pure: another call gives the same graph.
  EXPECT_EQ(divide(*whole, eager_options(table, 2)).graph.to_string(), divided.graph.to_string());
}

TEST(DivideTest, TextOfAttention) {
  AttentionImpl net(2);
  EXPECT_EQ(divided_attention(net, 2).graph.to_string(), R"(%0 = input 0 : f64[2, 3, 8]
%1 = parameter qkv.weight : f64[12, 8] grad
%2 = parameter qkv.bias : f64[12] grad
%3 = parameter out.weight : f64[8, 4] grad
%4 = parameter out.bias : f64[8] grad
%5 = aten::t(self=%1) : f64[8, 12]{1, 8}  # qkv
%6 = aten::matmul(self=%0, other=%5) : f64[2, 3, 12]  # qkv
%7 = aten::add_.Tensor(self=%6, other=%2, alpha=$) : f64[2, 3, 12]  # qkv
%8 = aten::view(self=%7, size=[2, 3, 3, 1, 4]) : f64[2, 3, 3, 1, 4]
%9 = aten::permute(self=%8, dims=[2, 0, 3, 1, 4]) : f64[3, 2, 1, 3, 4]{4, 36, 4, 12, 1}
%10 = aten::select.int(self=%9, dim=0, index=0) : f64[2, 1, 3, 4]{36, 4, 12, 1}
%11 = aten::select.int(self=%9, dim=0, index=1) : f64[2, 1, 3, 4]{36, 4, 12, 1}
%12 = aten::select.int(self=%9, dim=0, index=2) : f64[2, 1, 3, 4]{36, 4, 12, 1}
%13 = aten::scaled_dot_product_attention(query=%10, key=%11, value=%12, attn_mask=None, dropout_p=$, is_causal=true, scale=$, enable_gqa=false) : f64[2, 1, 3, 4]
%14 = aten::transpose.int(self=%13, dim0=1, dim1=2) : f64[2, 3, 1, 4]
%15 = aten::reshape(self=%14, shape=[2, 3, 4]) : f64[2, 3, 4]
%16 = aten::t(self=%3) : f64[4, 8]{1, 4}  # out
%17 = aten::matmul(self=%15, other=%16) : f64[2, 3, 8]  # out
%18 = smp::tp_reduce(x=%17) : f64[2, 3, 8]  # out
%19 = aten::add_.Tensor(self=%18, other=%4, alpha=$) : f64[2, 3, 8]  # out
%20 = aten::sum(self=%19, dtype=None) : f64[]
backward %20
return %20
)");
}

TEST(DivideTest, OneCopyForAllReaders) {
  torch::nn::Linear a(4, 4), b(4, 4), c(4, 4);
  torch::nn::Module net;
  for (auto [name, layer] : {std::pair("a", a), std::pair("b", b), std::pair("c", c)}) {
    net.register_module(name, layer);
  }
  const TensorTable table = table_of(net);
  const auto whole =
      capture(table, {torch::ones({2, 4})}, training([&](const Tensors& in) -> Tensors {
                const auto x = c(in[0]);
                return {(a(x).exp() * b(x)).sum()};
              }));
  DivideOptions options = eager_options(table, 2);
  options.allowed = {"a.weight", "a.bias", "b.weight", "b.bias"};
  EXPECT_EQ(collectives(divide(*whole, options).graph), "copy reduce");
}

TEST(DivideTest, EvaluationNeedsNoCopy) {
  AttentionImpl net(2);
  EXPECT_EQ(collectives(divided_attention(net, 2, /*trains=*/false).graph), "reduce");
}

TEST(DivideTest, LeavesGetWholeTensors) {
  TwoLayersImpl net(4, 6);
  const TensorTable table = table_of(net);
  auto call = c10::make_intrusive<graph::LeafCall>();
  call->module = "Sorted";
  call->function = [](graph::LeafCall&, const Tensors& in) -> Tensors {
    return {std::get<0>(in[0].sort(1))};
  };
  const auto whole = capture(table, batch(4), training([&](const Tensors& in) -> Tensors {
                               return {net.down(graph::call_leaf(call, {net.up(in[0])})[0]).sum()};
                             }));
  DivideOptions options = eager_options(table, 2);
  options.fixed["up.weight"] = {{6, 4}, 0, 1, 2};
  const DividedGraph divided = divide(*whole, options);
  for (size_t i = 0; i < whole->operators.size(); ++i) {
    if (!graph::is_leaf(whole->operators[i].handle)) continue;
    const auto& leaf = divided.graph.operators[divided.map.operators[i].at(0)];
    EXPECT_EQ(divided.graph.values[leaf.arguments[2].values[0]].meta.sizes[1], 6);
    EXPECT_EQ(divided.graph.values[leaf.results[0]].meta.sizes[1], 6);
    // The call of each step reaches the operator.
    EXPECT_EQ(divided.map.constants({{static_cast<int>(i), 0, c10::IValue()}}).size(), 1u);
    return;
  }
  FAIL() << "no leaf in\n" << whole->to_string();
}

/// Inserted operators run in the modes of those that need them.
TEST(DivideTest, ModesAreKept) {
  torch::nn::Linear up(4, 6), down(6, 4);
  torch::nn::Module net;
  net.register_module("up", up);
  net.register_module("down", down);
  const TensorTable table = table_of(net);
  const auto whole =
      capture(table, {torch::ones({2, 4})}, training([&](const Tensors& in) -> Tensors {
                at::autocast::set_autocast_enabled(at::kCPU, true);
                const auto result = down(up(in[0]).relu());
                at::autocast::clear_cache();
                at::autocast::set_autocast_enabled(at::kCPU, false);
                return {result.to(torch::kFloat).sum()};
              }));
  const DividedGraph divided = divide(*whole, eager_options(table, 2));
  ASSERT_EQ(collectives(divided.graph), "reduce");
  for (size_t i = 0; i < divided.graph.operators.size(); ++i) {
    if (divided.graph.operators[i].name() != "smp::tp_reduce") continue;
    const std::string line = divided.graph.line(i);
    EXPECT_NE(line.find("bf16[2, 4] autocast_cpu(bf16)"), std::string::npos) << line;
  }
  for (size_t v = 0; v < whole->values.size(); ++v) {
    const auto& got = divided.graph.values[divided.map.values[v].at(0)];
    EXPECT_EQ(got.meta.dtype, whole->values[v].meta.dtype) << divided.graph.to_string();
  }
}

TEST(DivideTest, CostsAreDivided) {
  TwoLayersImpl net(64, 256);
  const TensorTable table = table_of(net);
  const auto whole = capture(table, batch(64), step_of(net));
  for (auto& op : whole->operators) op.cost = {100, 200, 4000, 2000};
  const DividedGraph divided = divide(*whole, eager_options(table, 4));
  const auto& up = divided.graph.operators[divided.map.operators[1][0]];
  EXPECT_EQ(up.name(), "aten::addmm");
  EXPECT_EQ(up.cost.forward_us, 25);
  EXPECT_EQ(up.cost.backward_us, 50);
  EXPECT_EQ(up.cost.output_bytes, 1000);
  EXPECT_EQ(up.cost.saved_bytes, 500);
  EXPECT_LT(divided.divided_us, divided.whole_us);
}

TEST(DivideTest, SlowNetworksDivideNothing) {
  TwoLayersImpl net(64, 256);
  const TensorTable table = table_of(net);
  const auto whole = capture(table, batch(64), step_of(net));
  DivideOptions options = eager_options(table, 2);
  options.latency_us = 1e6;
  const DividedGraph divided = divide(*whole, options);
  EXPECT_TRUE(divided.parameters.empty());
  ASSERT_EQ(divided.graph.operators.size(), whole->operators.size());
  for (size_t i = 0; i < whole->operators.size(); ++i) {
    EXPECT_EQ(divided.graph.operators[i].name(), whole->operators[i].name());
  }
  EXPECT_EQ(divided.divided_us, divided.whole_us);
  const auto& decision = decision_of(divided, "up.weight");
  EXPECT_TRUE(decision.skipped);
  EXPECT_NE(decision.why_whole->find("dividing it is predicted to take"), std::string::npos)
      << *decision.why_whole;
  EXPECT_NE(decision.why_whole->find("us a microbatch instead of"), std::string::npos);
}

/// Measured times differ from run to run; the division must not.
TEST(DivideTest, EstimatesFollowFromSizes) {
  const auto divided = [](int64_t width, double measured_us) {
    TwoLayersImpl net(width, 4 * width);
    const TensorTable table = table_of(net);
    const auto whole = capture(table, batch(width), step_of(net));
    for (auto& op : whole->operators) op.cost.forward_us = op.cost.backward_us = measured_us;
    DivideOptions options = eager_options(table, 2);
    options.parameter_us_per_byte = 0;
    options.latency_us = 10;
    options.estimate = true;
    return divide(*whole, options).parameters;
  };
  EXPECT_EQ(divided(512, 0).size(), 3);  // the bias behind the sum is whole
  EXPECT_EQ(divided(512, 1e6), divided(512, 0));
  EXPECT_TRUE(divided(8, 1e6).empty());
}

/// However slow the network is, divided parameters are divided in the fastest way.
TEST(DivideTest, SlowNetworksDivideWhereTheUserInsists) {
  TwoLayersImpl net(64, 256);
  const TensorTable table = table_of(net);
  const auto whole = capture(table, batch(64), step_of(net));
  DivideOptions options = eager_options(table, 2);
  options.latency_us = 1e6;
  options.insist = true;
  const DividedGraph divided = divide(*whole, options);
  EXPECT_EQ(collectives(divided.graph), "reduce");
  EXPECT_EQ(decision_of(divided, "up.weight").split->dim, 0);
  EXPECT_EQ(decision_of(divided, "down.weight").split->dim, 1);
  EXPECT_GT(divided.divided_us, divided.whole_us);
}

TEST(DivideTest, TrafficIsThatOfTheFormula) {
  TwoLayersImpl net(8, 16);
  const TensorTable table = table_of(net);
  const auto whole = capture(table, batch(8), training([&](const Tensors& in) -> Tensors {
                               const auto x = net.forward(in[0]);
                               return {net.forward(x).sum()};
                             }));
  const DividedGraph divided = divide(*whole, eager_options(table, 4));
  // A sum of two layers' [2, 8] f64 over 4 ranks sends 2 * 3/4 of it. The first has no gradient to
  // sum, since its input needs none.
  const int64_t sum = 2 * 3 * (2 * 8 * 8) / 4;
  EXPECT_EQ(divided.traffic.forward_calls, 2);
  EXPECT_EQ(divided.traffic.forward_bytes, 2 * sum);
  EXPECT_EQ(divided.traffic.backward_calls, 1);
  EXPECT_EQ(divided.traffic.backward_bytes, sum);
}

TEST(DivideTest, Reasons) {
  struct Net : torch::nn::Module {
    Net() {
      marked = register_module("marked", torch::nn::Linear(7, 5));
      other = register_module("other", torch::nn::Linear(5, 4));
      norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
      up = register_module("up", torch::nn::Linear(4, 8));
      down = register_module("down", torch::nn::Linear(8, 4));
      unused = register_parameter("unused", torch::ones({4}));
    }
    Tensor forward(Tensor x) {
      x = norm(other(marked(x)));
      return down(up(x).relu()) + unused.sum() * 0;
    }
    torch::nn::Linear marked{nullptr}, other{nullptr}, up{nullptr}, down{nullptr};
    torch::nn::LayerNorm norm{nullptr};
    Tensor unused;
  } net;
  const TensorTable table = table_of(net);
  const auto whole =
      capture(table, {torch::ones({2, 7})},
              training([&](const Tensors& in) -> Tensors { return {net.forward(in[0]).sum()}; }));
  DivideOptions options = eager_options(table, 2);
  options.allowed.erase("other.weight");
  const DividedGraph divided = divide(*whole, options);
  const auto reason = [&](const char* name) { return decision_of(divided, name).why_whole; };
  EXPECT_EQ(reason("marked.weight"), "no dimension of [5, 7] can be divided among 2 ranks");
  EXPECT_EQ(reason("other.weight"), "its module is not marked for tensor parallelism");
  EXPECT_EQ(reason("norm.weight"), "operator aten::layer_norm uses it on whole values");
  EXPECT_EQ(reason("down.bias"), "it is added once, to the sum over the ranks");
  EXPECT_EQ(reason("up.weight"), std::nullopt);
  EXPECT_TRUE(decision_of(divided, "marked.weight").skipped);
  EXPECT_FALSE(decision_of(divided, "other.weight").skipped);
  EXPECT_FALSE(decision_of(divided, "norm.weight").skipped);
  const std::string text = report(divided);
  for (const char* line : {"up.weight      [8, 4]  [4, 4]     divided along dimension 0",
                           "norm.weight    [4]     [4]        whole: operator aten::layer_norm "
                           "uses it on whole values",
                           "What a rank sends for a microbatch:", "Parameters: 3 of 11 divided"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
  }
}

TEST(DivideTest, HeadsThatRanksCannotShare) {
  AttentionImpl net(12);
  const DividedGraph divided = divided_attention(net, 8);
  EXPECT_EQ(decision_of(divided, "qkv.weight").why_whole,
            "12 heads cannot be divided among 8 ranks");
  EXPECT_TRUE(decision_of(divided, "qkv.weight").skipped);
}

/// Four heads of four numbers: all but the blocks of queries, keys and values can be divided.
TEST(DivideTest, BlocksThatRanksCannotShare) {
  AttentionImpl net(4);
  EXPECT_EQ(decision_of(divided_attention(net, 3), "qkv.weight").why_whole,
            "its 3 blocks of 16 along dimension 0 cannot be divided among 3 ranks");
}

/// libtorch's module, whose heads are found in its joined projection.
TEST(DivideTest, ReasonsOfMultiheadAttention) {
  torch::nn::MultiheadAttention net(torch::nn::MultiheadAttentionOptions(24, 4));
  net->to(torch::kDouble);
  const TensorTable table = table_of(*net);
  const auto whole = capture(table, {torch::ones({3, 2, 24}, torch::kDouble)},
                             training([&](const Tensors& in) -> Tensors {
                               return {std::get<0>(net(in[0], in[0], in[0])).sum()};
                             }));
  const auto decided = [&](int ranks, double latency_us, bool insist) {
    DivideOptions options = eager_options(table, ranks);
    options.latency_us = latency_us;
    options.insist = insist;
    return decision_of(divide(*whole, options), "in_proj_weight");
  };
  constexpr double kSlow = 1e6;
  EXPECT_EQ(decided(2, kSlow, /*insist=*/true).split.value().blocks, 3);
  const std::string reason = decided(2, kSlow, /*insist=*/false).why_whole.value();
  EXPECT_EQ(reason.find("dividing it is predicted to take "), 0u) << reason;
  EXPECT_EQ(decided(3, 0, /*insist=*/true).why_whole, "4 heads cannot be divided among 3 ranks");
  EXPECT_EQ(decided(9, 0, /*insist=*/true).why_whole,
            "its 3 blocks of 24 along dimension 0 cannot be divided among 9 ranks");
  EXPECT_EQ(decided(5, 0, /*insist=*/true).why_whole,
            "no dimension of [72, 24] can be divided among 5 ranks");
}

TEST(DivideTest, LaterGraphsFollowTheFirst) {
  TwoLayersImpl net(4, 8);
  const TensorTable table = table_of(net);
  const auto first = capture(table, batch(4), step_of(net));
  DivideOptions options = eager_options(table, 2);
  options.fixed = divide(*first, options).parameters;
  options.latency_us = 1e6;  // it would not be divided otherwise
  const Function evaluate = [&](const Tensors& in) -> Tensors { return {net.forward(in[0])}; };
  const Tensors other = {torch::randn({7, 4}, torch::kDouble)};
  const auto whole = capture(table, other, evaluate);
  const DividedGraph divided = divide(*whole, options);
  EXPECT_EQ(divided.parameters, options.fixed);
  expect_equals_plain(divided, net, table, other, evaluate, 2);
}

TEST(DivideTest, FixedSplitOfAnotherModel) {
  TwoLayersImpl net(4, 8);
  const TensorTable table = table_of(net);
  const auto whole = capture(table, batch(4), step_of(net));
  DivideOptions options = eager_options(table, 2);
  options.fixed["up.weight"] = {{6, 4}, 0, 1, 2};
  EXPECT_EQ(
      error_of<UsageError>([&] { divide(*whole, options); }),
      "[smp] parameter \"up.weight\" is divided as [6, 4] along dimension 0 over 2 ranks, but "
      "this step function reads it with sizes [8, 4] on 2 ranks. Parameters keep their "
      "sizes, and the way they are divided, once a step has run");
}

TEST(DivideTest, NumbersThatChange) {
  AttentionImpl net(2, 0.5);
  const DividedGraph drops = divided_attention(net, 2);
  const auto attention = [](const graph::Graph& graph) {
    for (size_t i = 0; i < graph.operators.size(); ++i) {
      if (graph.operators[i].name() == "aten::scaled_dot_product_attention") {
        return static_cast<int>(i);
      }
    }
    return -1;
  };
  const TensorTable table = table_of(net);
  const Tensors in = {torch::randn({2, 3, 8}, torch::kDouble)};
  const Function step =
      training([&](const Tensors& x) -> Tensors { return {net.forward(x[0]).sum()}; });
  const auto whole = capture(table, in, step);
  const int index = attention(*whole);
  ASSERT_GE(index, 0);

  // Another probability of dropout is another number in the operator that stands for it.
  const auto changes = drops.map.constants({{index, 4, 0.25}});
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(drops.graph.operators[changes[0].operator_index].name(), "smp::tp_dropout");
  net.dropout = 0.25;
  const Replayed plain = run_plain(net, table, in, step);
  for (const auto& got : run_on_ranks(drops, table, in, 2, changes)) {
    expect_close(got.outputs[0], plain.outputs[0], "with another probability");
  }

  net.dropout = 0;
  const DividedGraph plain_attention = divided_attention(net, 2);
  EXPECT_EQ(error_of<UsageError>([&] {
              plain_attention.map.constants({{index, 4, 0.25}});
            }),
            "[smp] a number in operator aten::scaled_dot_product_attention is now 0.25, but it "
            "decided how tensor parallelism divided the operator. Keep it as it was in the first "
            "step, or give steps of another kind a step function of their own");
}

/// The pass on the result of another one: losses, sums of gradients and numbers that change are
/// those of the microbatches one by one.
TEST(DivideTest, SeveralMicrobatchesAsOne) {
  constexpr int kFactor = 3;
  TwoLayersImpl net(4, 6);
  const TensorTable table = table_of(net);
  double weight = 2;
  const Function step = training([&](const Tensors& in) -> Tensors {
    return {(net.forward(in[0]) * weight).square().mean()};
  });
  const Tensor all = torch::randn({2 * kFactor, 4}, torch::kDouble);
  const auto part = [&](int m) { return Tensors{all.narrow(0, 2 * m, 2)}; };
  const auto one = capture(table, part(0), step), many = capture(table, {all}, step);
  const auto axes = find_batch_axes(*one, *many, kFactor);
  ASSERT_EQ(axes.refusal, std::nullopt);
  graph::Coalesced coalesced = graph::coalesce(*one, *many, axes, kFactor);
  set_costs(coalesced.graph);
  const DividedGraph divided = divide(coalesced.graph, eager_options(table, 2));
  EXPECT_EQ(divided.parameters.size(), 3u) << report(divided);
  expect_metas_hold(divided, table, {all}, 2);

  weight = 3;
  const auto guarded = graph::testing::trace(table, part(0), step, false, {one.get()});
  ASSERT_EQ(guarded.match, one.get());
  ASSERT_FALSE(guarded.constants.empty());
  const graph::GraphMap map = graph::compose(coalesced.map, divided.map);
  EXPECT_EQ(map.factor, kFactor);
  const auto results = run_on_ranks(divided, table, {all}, 2, map.constants(guarded.constants));
  net.zero_grad();
  for (int m = 0; m < kFactor; ++m) {
    const Tensor loss = step(part(m))[0].detach();
    for (const Replayed& result : results) {
      ASSERT_EQ(result.outputs.size(), size_t{kFactor});
      expect_close(result.outputs[m], loss, c10::str("microbatch ", m));
    }
  }
  for (const auto& item : net.named_parameters()) {
    const auto split = divided.parameters.find(item.key());
    Tensors parts;
    for (const Replayed& result : results) parts.push_back(result.gradients.at(item.key()));
    expect_close(split == divided.parameters.end() ? parts[0] : split->second.join(parts),
                 item.value().grad(), item.key());
  }
}

TEST(DivideTest, ContentsFollow) {
  TwoLayersImpl net(4, 8);
  const TensorTable table = table_of(net);
  const auto whole = capture(
      table, batch(4), training([&](const Tensors& in) -> Tensors {
        return {(net.forward(in[0]) * torch::tensor(std::vector<double>{2, 3, 4, 5})).sum()};
      }));
  const DividedGraph divided = divide(*whole, eager_options(table, 2));
  for (size_t v = 0; v < whole->values.size(); ++v) {
    if (whole->values[v].kind != graph::ValueKind::kLiteral) continue;
    const auto changes =
        divided.map.contents({{static_cast<graph::ValueId>(v), torch::full({4}, 3.0)}});
    ASSERT_EQ(changes.size(), 1u);
    EXPECT_EQ(divided.graph.values[changes[0].value].kind, graph::ValueKind::kLiteral);
    EXPECT_EQ(changes[0].content[1].item<double>(), 3);
    return;
  }
  FAIL() << "no literal in\n" << whole->to_string();
}

TEST(DivideTest, WhyNot) {
  TwoLayersImpl net(4, 8);
  const TensorTable table = table_of(net);
  const auto whole = capture(table, batch(4), step_of(net));
  DivideOptions options = eager_options(table, 2);
  EXPECT_EQ(why_none_divided(*whole, options), std::nullopt);
  options.allowed.clear();
  EXPECT_EQ(why_none_divided(*whole, options),
            "no module with a weight of products or embeddings is marked for tensor parallelism");
  options.ranks = 1;
  EXPECT_EQ(why_none_divided(*whole, options), "the tensor-parallel group has one rank");
  const auto sum =
      capture(table, batch(4), [](const Tensors& in) -> Tensors { return {in[0].sum()}; });
  options.ranks = 2;
  EXPECT_EQ(why_none_divided(*sum, options),
            "no operator multiplies by a parameter or looks one up");
}

/// A rule for an operator that this library does not know, and one that is wrong.
TEST(DivideTest, RegisteredRules) {
  TwoLayersImpl net(4, 8);
  const TensorTable table = table_of(net);
  const Function step = training([&](const Tensors& in) -> Tensors {
    return {net.down(net.up(in[0]).cumsum(0).logaddexp2(torch::ones({}, torch::kDouble))).sum()};
  });
  const auto whole = capture(table, batch(4), step);
  const DivideOptions options = eager_options(table, 2);
  EXPECT_NE(collectives(divide(*whole, options).graph), "reduce");
  register_rule("aten::logaddexp2", elementwise);
  const DividedGraph divided = divide(*whole, options);
  EXPECT_EQ(collectives(divided.graph), "reduce");
  expect_equals_plain(divided, net, table, batch(4), step, 2);

  register_rule("aten::logaddexp2", [](const Call& call) {
    std::optional<Treatment> treatment = elementwise(call);
    if (treatment) treatment->results[0] = Layout::divided(0);
    return treatment;
  });
  EXPECT_EQ(error_of<UsageError>([&] { divide(*whole, options); }),
            "[smp] the rule of operator aten::logaddexp2 says that its result is divided(0), of "
            "sizes [1, 8] on each rank, but on what it asks for the operator makes f64[2, 4]. "
            "Correct the rule (smp::tp_register)");
  register_rule("aten::logaddexp2", elementwise);
}

}  // namespace
}  // namespace smp::nn::rewrite::testing
