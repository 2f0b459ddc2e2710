// SPDX-License-Identifier: Apache-2.0
// Residuals of models that know nothing of it, added in float32.

#include "nn/rewrite/residual_sums.h"

#include <algorithm>

#include "tests/nn/rewrite/harness.h"

namespace smp::nn::rewrite::testing {
namespace {

using torch::Tensor;

constexpr int64_t kSumWidth = 8;
const auto kInFloat32 = TensorParallelismOptions().fp32_residual_addition(true);

/// How blocks add their results.
enum class Form { kOneAfterTheOther, kBothAtOnce, kByHandInFloat32 };

/// Blocks of two perceptrons each, with residuals around them.
struct BlocksImpl : torch::nn::Module {
  explicit BlocksImpl(Form form_ = Form::kOneAfterTheOther) : form(form_) {
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i) {
      up.push_back(register_module(c10::str("up", i), torch::nn::Linear(kSumWidth, 4 * kSumWidth)));
      down.push_back(
          register_module(c10::str("down", i), torch::nn::Linear(4 * kSumWidth, kSumWidth)));
    }
    to(torch::kBFloat16);
  }

  Tensor branch(int i, const Tensor& x) { return down[i](torch::tanh(up[i](x))); }

  Tensor forward(Tensor x) {
    Tensor wide = x.to(torch::kFloat);
    for (int i = 0; i < 4; i += 2) {
      if (form == Form::kOneAfterTheOther) {
        x = x + branch(i, x);
        x = branch(i + 1, x) + x;
      } else if (form == Form::kBothAtOnce) {
        x = x + branch(i, x) + branch(i + 1, x);
      } else {
        wide = wide + branch(i, x).to(torch::kFloat);
        x = wide.to(torch::kBFloat16);
        wide = branch(i + 1, x).to(torch::kFloat) + wide;
        x = wide.to(torch::kBFloat16);
      }
    }
    return x;
  }

  Form form;
  std::vector<torch::nn::Linear> up, down;
};
TORCH_MODULE(Blocks);

Tensors states() {
  torch::manual_seed(4);
  return {torch::randn({4, kSumWidth}).to(torch::kBFloat16)};
}

Function step_of(Blocks& net) {
  return training([&net](const Tensors& in) -> Tensors {
    const auto result = net(in[0]);
    return {result.square().mean(), result};
  });
}

std::map<std::string, TensorParallelismOptions> said_of(const TensorTable& table,
                                                        const std::string& prefix = "") {
  std::map<std::string, TensorParallelismOptions> said;
  for (const auto& entry : table.entries()) {
    if (entry.name.rfind(prefix, 0) == 0) said[entry.name] = kInFloat32;
  }
  return said;
}

/// The names of the operators that are residual sums, by number among all that add.
std::vector<bool> found(const Graph& graph,
                        const std::map<std::string, TensorParallelismOptions>& said) {
  const std::vector<bool> all = residual_sums(graph, said);
  std::vector<bool> of_sums;
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string& name = graph.operators[i].handle.operator_name().name;
    if (name == "aten::add" || name == "aten::add_") of_sums.push_back(all[i]);
  }
  return of_sums;
}

TEST(ResidualSums, AreThoseOfAValueAndWhatProductsMadeOfIt) {
  Blocks net;
  const TensorTable table = table_of(*net);
  const auto said = said_of(table);
  const auto found_in = [&](const std::function<Tensor(const Tensor&)>& body) {
    const auto graph =
        capture(table, states(), [&](const Tensors& in) -> Tensors { return {body(in[0])}; });
    return found(*graph, said);
  };
  using Found = std::vector<bool>;
  EXPECT_EQ(found_in([&](const Tensor& x) { return net(x); }), Found({true, true, true, true}));
  // Branches that are added at once: the second sum adds to a residual sum.
  EXPECT_EQ(found_in([&](const Tensor& x) { return x + net->branch(0, x) + net->branch(1, x); }),
            Found({true, true}));
  EXPECT_EQ(found_in([&](const Tensor& x) { return (net->branch(0, x) + net->branch(1, x)) + x; }),
            Found({false, true}));
  // No product lies between, as in the formula of an activation.
  EXPECT_EQ(found_in([](const Tensor& x) { return x + x.pow(3) * 0.04; }), Found({false}));
  // Neither was made of the other.
  EXPECT_EQ(found_in([&](const Tensor& x) { return net->branch(0, x) + net->branch(1, x); }),
            Found({false}));
  // Other sizes, other types, in place, and memory that is written later.
  EXPECT_EQ(found_in([&](const Tensor& x) { return x + net->branch(0, x).sum(0); }),
            Found({false}));
  EXPECT_EQ(found_in([&](const Tensor& x) { return x.to(torch::kFloat) + net->branch(0, x); }),
            Found({false}));
  EXPECT_EQ(found_in([&](const Tensor& x) {
              auto y = x * 1;
              y += net->branch(0, y);
              return y;
            }),
            Found({false}));
  EXPECT_EQ(found_in([&](const Tensor& x) { return (x + net->branch(0, x)).relu_(); }),
            Found({false}));
}

TEST(ResidualSums, AreSaidByTheParametersNextToWhatIsAdded) {
  Blocks net;
  const TensorTable table = table_of(*net);
  const auto graph = capture(table, states(), step_of(net));
  EXPECT_EQ(found(*graph, said_of(table, "down1")), (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(found(*graph, said_of(table, "up1")), std::vector<bool>(4));
}

/// The types in which a graph adds tensors of the sizes of the residual, and how many of the sums
/// are added to in the next one as they are.
std::pair<int, int> sums_in_float32(const Graph& graph) {
  int sums = 0, kept = 0;
  for (const auto& op : graph.operators) {
    if (op.name() != "aten::add.Tensor") continue;
    if (graph.values[op.results[0]].meta.dtype != torch::kFloat) continue;
    ++sums;
    for (int i = 0; i < 2; ++i) {
      const int made_by = graph.values[op.arguments[i].values[0]].producer;
      kept += made_by >= 0 && graph.operators[made_by].name() == "aten::add.Tensor" ? 1 : 0;
    }
  }
  return {sums, kept};
}

/// The same bits as the same model that keeps its residual in float32 by hand, divided alike.
TEST(ResidualSums, HaveTheBitsOfThoseByHand) {
  Blocks net, by_hand(Form::kByHandInFloat32);
  const TensorTable table = table_of(*net), table_by_hand = table_of(*by_hand);
  const auto whole = capture(table, states(), step_of(net));
  const auto whole_by_hand = capture(table_by_hand, states(), step_of(by_hand));
  for (const auto& options_for : {eager_options, memory_options}) {
    for (const int ranks : {2, 4}) {
      DivideOptions options = options_for(table, ranks);
      const DividedGraph in_half = divide(*whole, options);
      const DividedGraph expected = divide(*whole_by_hand, options);
      options.options_of = said_of(table);
      const DividedGraph divided = divide(*whole, options);
      ASSERT_EQ(divided.parameters.count("down0.weight"), 1u) << report(divided);
      EXPECT_EQ(divided.computed_otherwise.size(), 4u);
      EXPECT_EQ(sums_in_float32(divided.graph), std::pair(4, 3)) << divided.graph.to_string();
      expect_metas_hold(divided, table, states(), ranks);
      const auto got = run_on_ranks(divided, table, states(), ranks);
      const auto want = run_on_ranks(expected, table_by_hand, states(), ranks);
      const auto rounded = run_on_ranks(in_half, table, states(), ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_TRUE(torch::equal(got[rank].outputs[1], want[rank].outputs[1]));
        EXPECT_FALSE(torch::equal(got[rank].outputs[1], rounded[rank].outputs[1]));
        for (const auto& [name, gradient] : want[rank].gradients) {
          EXPECT_TRUE(torch::equal(got[rank].gradients.at(name), gradient)) << name;
        }
      }
    }
  }
}

/// A residual to which branches are added at once is one.
TEST(ResidualSums, GoOnWhereSeveralBranchesAreAdded) {
  Blocks net(Form::kBothAtOnce);
  const TensorTable table = table_of(*net);
  DivideOptions options = eager_options(table, 2);
  options.options_of = said_of(table);
  const auto divided = divide(*capture(table, states(), step_of(net)), options);
  EXPECT_EQ(sums_in_float32(divided.graph), std::pair(4, 3)) << divided.graph.to_string();
  expect_metas_hold(divided, table, states(), 2);
}

}  // namespace
}  // namespace smp::nn::rewrite::testing
