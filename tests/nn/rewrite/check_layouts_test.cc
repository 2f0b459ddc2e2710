// SPDX-License-Identifier: Apache-2.0
// Whatever is done to a divided graph that would make wrong numbers of it, `check_layouts` names.

#include "nn/rewrite/legality.h"
#include "partitioner/order.h"
#include "tests/error_of.h"
#include "tests/nn/rewrite/harness.h"

namespace smp::nn::rewrite::testing {
namespace {

using graph::ValueId;
using smp::testing::error_or_none;
using torch::Tensor;

constexpr int kRanks = 2;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    qkv = register_module("qkv", torch::nn::Linear(8, 24));
    out = register_module("out", torch::nn::Linear(8, 8));
    up = register_module("up", torch::nn::Linear(8, 16));
    down = register_module("down", torch::nn::Linear(16, 8));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& input) {
    const auto x = norm(input);
    const auto parts = qkv(x).view({x.size(0), x.size(1), 3, 4, 2}).permute({2, 0, 3, 1, 4});
    const auto mixed = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
    const auto y = x + out(mixed.transpose(1, 2).reshape(x.sizes()));
    return y + down(torch::gelu(up(norm(y))));
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};

DividedGraph divided_block(bool streams) {
  BlockImpl net;
  const TensorTable table = table_of(net);
  const auto whole =
      capture(table, {torch::ones({2, 4, 8}, torch::kDouble)},
              training([&](const Tensors& in) -> Tensors { return {net.forward(in[0]).sum()}; }));
  return divide(*whole, streams ? memory_options(table, kRanks) : eager_options(table, kRanks));
}

std::string refusal(const DividedGraph& divided) {
  return error_or_none([&] { check_layouts(divided, divided.graph); });
}

class CheckLayoutsTest : public ::testing::TestWithParam<bool> {
 protected:
  const DividedGraph divided_ = divided_block(GetParam());
};

/// Readers of an operator's result get its argument.
void leave_out(Graph& graph, size_t index) {
  const ValueId result = graph.operators[index].results[0];
  const ValueId argument = graph.operators[index].arguments[0].values[0];
  const auto replace = [&](ValueId& value) {
    if (value == result) value = argument;
  };
  for (size_t i = index + 1; i < graph.operators.size(); ++i) {
    for (auto& own : graph.operators[i].arguments) {
      std::for_each(own.values.begin(), own.values.end(), replace);
    }
  }
  std::for_each(graph.outputs.begin(), graph.outputs.end(), replace);
  for (auto& root : graph.roots) replace(root.value);
}

TEST_P(CheckLayoutsTest, NamesCommunicationThatIsLeftOut) {
  int tried = 0;
  for (size_t i = 0; i < divided_.graph.operators.size(); ++i) {
    if (!is_collective(divided_.graph.operators[i])) continue;
    DividedGraph wrong = divided_;
    leave_out(wrong.graph, i);
    EXPECT_NE(refusal(wrong).find("the divided graph"), std::string::npos)
        << divided_.graph.line(i) << "\n"
        << refusal(wrong);
    ++tried;
  }
  EXPECT_GE(tried, 4) << divided_.graph.to_string();
}

TEST_P(CheckLayoutsTest, NamesCommunicationAlongAnotherDimension) {
  int tried = 0;
  for (size_t i = 0; i < divided_.graph.operators.size(); ++i) {
    const auto& op = divided_.graph.operators[i];
    if (!is_collective(op)) continue;
    for (size_t a = 1; a < op.arguments.size(); ++a) {
      if (!op.arguments[a].constant.isInt()) continue;
      DividedGraph wrong = divided_;
      wrong.graph.operators[i].arguments[a].constant = op.arguments[a].constant.toInt() + 1;
      EXPECT_NE(refusal(wrong).find(op.name()), std::string::npos) << divided_.graph.line(i);
      ++tried;
    }
  }
  EXPECT_EQ(tried > 0, GetParam()) << divided_.graph.to_string();
}

/// The layouts that a value does not have, but for sums of gradients where there is none.
std::vector<Layout> others(const Layout& own, const graph::TensorMeta& meta) {
  std::vector<Layout> all = {Layout::partial()};
  if (meta.requires_grad || !(own.is_whole() || own == Layout::shared())) {
    all.push_back(Layout::whole());
    all.push_back(Layout::shared());
  }
  for (int dim = 0; dim < static_cast<int>(meta.sizes.size()); ++dim) {
    all.push_back(Layout::divided(dim));
    all.push_back(Layout::divided(dim, 2));
  }
  all.erase(std::remove(all.begin(), all.end(), own), all.end());
  return all;
}

TEST_P(CheckLayoutsTest, NamesEveryOtherLayoutOfEveryValue) {
  for (size_t v = 0; v < divided_.layouts.size(); ++v) {
    for (const Layout& other : others(divided_.layouts[v], divided_.graph.values[v].meta)) {
      DividedGraph wrong = divided_;
      wrong.layouts[v] = other;
      EXPECT_NE(refusal(wrong), "") << "%" << v << " " << divided_.layouts[v].to_string()
                                    << " taken for " << other.to_string() << "\n"
                                    << divided_.graph.to_string();
    }
  }
}

/// A pass that gives the operators another order keeps the values.
TEST_P(CheckLayoutsTest, AsksAgainAfterAnotherOrder) {
  partitioner::Order order(divided_.graph.operators.size());
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = 0; i + 1 < order.size(); ++i) {
    std::swap(order[i], order[i + 1]);
    if (partitioner::why_illegal_order(divided_.graph, order)) {
      std::swap(order[i], order[i + 1]);
    }
  }
  const Graph moved = partitioner::reordered(divided_.graph, order);
  ASSERT_NE(moved.to_string(), divided_.graph.to_string());
  check_layouts(divided_, moved);
  for (size_t i = 0; i < moved.operators.size(); ++i) {
    if (!is_collective(moved.operators[i])) continue;
    Graph wrong = moved;
    leave_out(wrong, i);
    EXPECT_NE(error_or_none([&] { check_layouts(divided_, wrong); }), "") << moved.line(i);
  }
}

INSTANTIATE_TEST_SUITE_P(Streams, CheckLayoutsTest, ::testing::Bool());

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    up = register_module("up", torch::nn::Linear(4, 8));
    down = register_module("down", torch::nn::Linear(8, 4));
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
};

TEST(CheckLayoutsOfTwoLayers, TextOfASumThatIsLeftOut) {
  LayersImpl net;
  const TensorTable table = table_of(net);
  const auto whole = capture(table, {torch::ones({2, 4})}, training([&](const Tensors& in) {
                               return Tensors{net.down(net.up(in[0]).relu()).sum()};
                             }));
  DividedGraph divided = divide(*whole, eager_options(table, kRanks));
  ASSERT_EQ(collectives(divided.graph), "reduce");
  for (size_t i = 0; i < divided.graph.operators.size(); ++i) {
    if (divided.graph.operators[i].name() == "smp::tp_reduce") leave_out(divided.graph, i);
  }
  const std::string text = refusal(divided);
  EXPECT_NE(text.find("operator aten::add.Tensor in or after module \"down\", which makes %11 "
                      "whole of %4 whole, %9 partial, in the divided graph does not compute on "
                      "parts what it computes on the whole"),
            std::string::npos)
      << text;
}

TEST(CheckLayoutsOfTwoLayers, NamesAMeanThatIsNotDivided) {
  LayersImpl net;
  const TensorTable table = table_of(net);
  const auto whole =
      capture(table, {torch::ones({2, 4})},
              training([&](const Tensors& in) { return Tensors{net.up(in[0]).relu().mean()}; }));
  const DividedGraph divided = divide(*whole, eager_options(table, kRanks));
  int tried = 0;
  for (size_t i = 0; i < divided.graph.operators.size(); ++i) {
    if (divided.graph.operators[i].name() != "aten::div.Scalar") continue;
    DividedGraph wrong = divided;
    wrong.graph.operators[i].arguments[1].constant = int64_t{3};
    EXPECT_NE(refusal(wrong).find("operator aten::mean"), std::string::npos);
    leave_out(wrong.graph, i);
    EXPECT_NE(refusal(wrong).find("operator aten::mean"), std::string::npos);
    ++tried;
  }
  EXPECT_EQ(tried, 1) << divided.graph.to_string();
}

}  // namespace
}  // namespace smp::nn::rewrite::testing
