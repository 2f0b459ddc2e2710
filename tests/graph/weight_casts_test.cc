// SPDX-License-Identifier: Apache-2.0
// The casts of weights that the microbatches of a step share.

#include "graph/weight_casts.h"

#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/node.h"
#include "graph/autocast.h"
#include "graph/autograd_entry.h"
#include "tests/graph/cast_counter.h"
#include "tests/graph/checkpointed.h"

namespace smp::graph::testing {
namespace {

using Gradients = std::map<std::string, torch::Tensor>;

/// Calls `work` under autocast of the CPU to bfloat16.
template <class Work>
torch::Tensor cast(const Work& work) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto off = c10::make_scope_exit([] {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  });
  return work();
}

constexpr int kWide = 128;  // casts of small weights are not shared on the CPU

struct SquareWeight : torch::nn::Module {
  SquareWeight() { weight = register_parameter("weight", torch::randn({kWide, kWide})); }
  torch::Tensor weight;
};

/// Autocast casts a leaf once for all its uses, as it does a parameter. A view that is older than
/// its base's history has no history of its own yet, but autocast casts it anew for each use.
TEST(Enter, MakesALeafOfAParameterButNotOfALateView) {
  const GradientSinkPtr of_weight = core::make_node<GradientSink>();
  const GradientSinkPtr of_view = core::make_node<GradientSink>();
  const torch::Tensor weight = torch::ones({4, 4}, torch::requires_grad());
  const torch::Tensor base = torch::ones({4, 4});
  const torch::Tensor view = base.narrow(0, 0, 2);
  base.mul_(weight);
  ASSERT_TRUE(view.is_leaf() && view.requires_grad());

  EXPECT_TRUE(enter(weight, of_weight).is_leaf());
  const torch::Tensor entered = enter(view, of_view);
  EXPECT_FALSE(entered.is_leaf());
  entered.sum().backward();
  EXPECT_TRUE(torch::equal(of_view->gradient, torch::ones({2, 4})));
}

/// A kernel that writes its own cast of the weight, for autocast and without.
torch::Tensor doubled(const torch::Tensor& x, const torch::Tensor& weight) {
  return torch::matmul(x, weight.to(torch::kBFloat16).mul_(2));
}
using Doubled = c10::TypedOperatorHandle<decltype(doubled)>;

Doubled operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<decltype(doubled)>();
}

/// A kernel of its own, and one that runs where autograd sees its operators.
constexpr const char* kDoubled[] = {"weight_casts_test::doubled",
                                    "weight_casts_test::doubled_in_parts"};

template <int kOperator>
torch::Tensor autocast_doubled(const torch::Tensor& x, const torch::Tensor& weight) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastCPU);
  return operator_of(kDoubled[kOperator])
      .call(at::autocast::cached_cast(torch::kBFloat16, x, at::kCPU), weight);
}

TORCH_LIBRARY(weight_casts_test, m) {
  m.def("doubled(Tensor x, Tensor weight) -> Tensor");
  m.impl("doubled", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(doubled));
  m.impl("doubled", c10::DispatchKey::AutocastCPU, TORCH_FN(autocast_doubled<0>));
  m.def("doubled_in_parts(Tensor x, Tensor weight) -> Tensor");
  m.impl("doubled_in_parts", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(doubled));
  m.impl("doubled_in_parts", c10::DispatchKey::AutocastCPU, TORCH_FN(autocast_doubled<1>));
}

/// Two layers, each of which is used twice in a scope of autocast, and weights that are not cast.
class TwoLayers {
 public:
  explicit TwoLayers(int64_t width = kWide) {
    torch::manual_seed(1);
    net = torch::nn::Sequential(torch::nn::Linear(width, width), torch::nn::GELU(),
                                torch::nn::Linear(width, width),
                                torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    for (int m = 0; m < 3; ++m) microbatches.push_back({torch::randn({4, width})});
  }

  Tensors function(const Tensors& inputs) {
    const auto y = cast([&] { return net->forward(net->forward(inputs[0])); });
    const auto loss = y.to(torch::kFloat).square().mean();
    testing::backward(loss);
    return {loss};
  }

  Function function() {
    return [this](const Tensors& inputs) { return function(inputs); };
  }

  /// Gradients of all microbatches by plain code, and their losses.
  std::vector<std::pair<torch::Tensor, Gradients>> plain() {
    std::vector<std::pair<torch::Tensor, Gradients>> result;
    for (const Tensors& inputs : microbatches) {
      net->zero_grad();
      const torch::Tensor loss = function(inputs)[0].detach();
      Gradients gradients;
      for (const auto& item : net->named_parameters()) {
        gradients[item.key()] = item.value().grad().clone();
      }
      result.emplace_back(loss, std::move(gradients));
    }
    return result;
  }

  /// Runs all forwards and then all backwards, and compares them with plain code.
  void expect_plain_bits(Checkpointed& step) {
    const auto expected = plain();
    CastCounter::take();
    std::vector<Checkpointed::Run> runs;
    for (const Tensors& inputs : microbatches) runs.push_back(step.forward(inputs, {}));
    for (size_t m = 0; m < runs.size(); ++m) {
      const Gradients gradients = Checkpointed::backward(runs[m]);
      EXPECT_TRUE(torch::equal(runs[m].outputs[0], expected[m].first));
      expect_equal(gradients, expected[m].second, "microbatch " + std::to_string(m));
    }
  }

  torch::nn::Sequential net{nullptr};
  std::vector<Tensors> microbatches;
};

TEST(WeightCasts, EachIsMadeOnceInAStep) {
  TwoLayers two;
  Checkpointed step(*two.net, two.microbatches[0], two.function());
  const CastCounter counter(two.net->parameters());
  for (const int length : {0, 3}) {
    step.set_regions([&](int index) { return length == 0 ? -1 : index / length; });
    two.expect_plain_bits(step);
    EXPECT_GE(CastCounter::take(), 3 * 4) << "not shared";
    for (int i = 0; i < 2; ++i) {
      step.segment().casts().begin_step();
      two.expect_plain_bits(step);
      EXPECT_EQ(CastCounter::take(), 4) << "regions of " << length;
      step.segment().casts().end_step();
      const torch::NoGradGuard no_grad;
      for (const torch::Tensor& parameter : two.net->parameters()) parameter.mul_(1.25);
    }
    two.expect_plain_bits(step);
    EXPECT_GE(CastCounter::take(), 3 * 4) << "after the step";
  }
}

/// Graphs of a device read the memory that there is when they are captured.
TEST(WeightCasts, ThoseOfGraphsAreWrittenWhenAStepBegins) {
  TwoLayers two;
  Checkpointed step(*two.net, two.microbatches[0], two.function());
  step.set_regions([](int) { return -1; });
  const CastCounter counter(two.net->parameters());
  WeightCasts& casts = step.segment().casts();
  casts.begin_step();
  step.forward(two.microbatches[0], {});
  casts.end_step();
  for (int capture = 0; capture < 2; ++capture) {
    CastCounter::take();
    casts.reserve();
    step.forward(two.microbatches[0], {});
    EXPECT_EQ(CastCounter::take(), 0);
    for (int i = 0; i < 2; ++i) {
      casts.begin_step();
      EXPECT_EQ(CastCounter::take(), 4);
      two.expect_plain_bits(step);
      EXPECT_EQ(CastCounter::take(), 0);
      casts.end_step();
      const torch::NoGradGuard no_grad;
      for (const torch::Tensor& parameter : two.net->parameters()) parameter.mul_(1.25);
    }
    casts.forget();
    // The next graphs read other memory.
    for (torch::Tensor& parameter : two.net->parameters()) {
      parameter.set_data(parameter.detach().clone());
    }
  }
  two.expect_plain_bits(step);
  EXPECT_GE(CastCounter::take(), 3 * 4);
}

/// The program may write its own casts.
TEST(WeightCasts, ThoseOfTheProgramAreItsOwn) {
  torch::manual_seed(2);
  SquareWeight net;
  const auto function = [&](const Tensors& inputs) -> Tensors {
    const auto y = cast([&] {
      auto product = torch::matmul(inputs[0], net.weight);
      auto own = net.weight.to(torch::kBFloat16).mul_(2);
      auto other = net.weight.type_as(product).add_(1);
      return product + torch::matmul(inputs[0], own) + torch::matmul(inputs[0], other);
    });
    const auto loss = y.to(torch::kFloat).square().mean();
    testing::backward(loss);
    return {loss};
  };
  const Tensors inputs = {torch::randn({4, kWide})};
  Checkpointed step(net, inputs, function);
  step.set_regions([](int) { return -1; });
  net.zero_grad();
  const torch::Tensor expected = function(inputs)[0].detach();
  step.segment().casts().begin_step();
  for (int m = 0; m < 3; ++m) {
    auto run = step.forward(inputs, {});
    EXPECT_TRUE(torch::equal(run.outputs[0], expected)) << m;
    EXPECT_TRUE(torch::equal(Checkpointed::backward(run).at("weight"), net.weight.grad())) << m;
  }
}

TEST(WeightCasts, ThoseOfAKernelAreItsOwn) {
  torch::manual_seed(4);
  SquareWeight net;
  for (const char* name : kDoubled) {
    const auto function = [&](const Tensors& inputs) -> Tensors {
      const torch::NoGradGuard no_grad;
      return {cast([&] { return operator_of(name).call(inputs[0], net.weight); })};
    };
    const Tensors inputs = {torch::randn({4, kWide})};
    Checkpointed step(net, inputs, function);
    step.set_regions([](int) { return -1; });
    const torch::Tensor expected = function(inputs)[0];
    step.segment().casts().begin_step();
    for (int m = 0; m < 3; ++m) {
      EXPECT_TRUE(torch::equal(step.forward(inputs, {}).outputs[0], expected)) << name << m;
    }
  }
}

/// Uses of weights whose casts may be shared, by alias set.
std::map<int, int> uses_in(const Graph& graph) {
  std::map<int, int> counts;
  for (const auto& weights : weights_to_cast(graph)) {
    for (ValueId id : weights) ++counts[graph.values[id].alias_set];
  }
  return counts;
}

Graph graph_of(TwoLayers& two) {
  return Checkpointed(*two.net, two.microbatches[0], two.function()).graph();
}

TEST(WeightCasts, AreOfWeightsThatNoOperatorWrites) {
  TwoLayers two;
  Graph graph = graph_of(two);
  const auto found = std::find_if(graph.values.begin(), graph.values.end(),
                                  [](const Value& value) { return value.name == "0.weight"; });
  ASSERT_NE(found, graph.values.end());
  EXPECT_EQ(uses_in(graph).at(found->alias_set), 2) << "the weight is transposed there";
  EXPECT_EQ(uses_in(graph).size(), 4u);
  graph.operators[0].writes.push_back(found->alias_set);
  EXPECT_EQ(uses_in(graph).count(found->alias_set), 0u);
  EXPECT_GE(uses_in(graph).size(), 2u) << "of the other layer";
}

TEST(WeightCasts, OfSmallWeightsAreNotSharedOnTheCpu) {
  TwoLayers two(/*width=*/8);
  EXPECT_EQ(uses_in(graph_of(two)).size(), 0u);
}

}  // namespace
}  // namespace smp::graph::testing
