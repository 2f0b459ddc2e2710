// SPDX-License-Identifier: Apache-2.0
// Step functions that differentiate: autograd::grad and requires_grad_ as operators of the graph.

#include "graph/differentiate.h"

#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>

#include "graph/checkpointed_segment.h"
#include "graph/leaf.h"
#include "graph/serialize.h"
#include "nn/rewrite/batch_axis.h"
#include "partitioner/cuts.h"
#include "tests/error_of.h"
#include "tests/graph/harness.h"

namespace smp::graph::testing {
namespace {

using ::testing::HasSubstr;
using torch::autograd::grad;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    fc = register_module("fc", torch::nn::Linear(4, 4));
    norm = register_module("norm", torch::nn::GroupNorm(2, 4));
  }
  torch::Tensor forward(torch::Tensor x) { return torch::tanh(norm(fc(x))); }

  torch::nn::Linear fc{nullptr};
  torch::nn::GroupNorm norm{nullptr};
};
TORCH_MODULE(Net);

class Differentiate : public ::testing::Test {
 protected:
  Differentiate() : net_(make_net()), table_(table_of(*net_)) {}

  static Net make_net() {
    torch::manual_seed(3);
    return Net();
  }

  /// Captured on data and on shapes: the same graph, which has the numbers of eager code and which
  /// the next run is found to follow.
  void expect_equals_eager(const Function& function) {
    table_ = table_of(*net_);
    expect_replay_equals_eager(*net_, {x_}, {torch::randn({4, 4})}, function);
    const TraceResult first = trace(table_, {x_}, function);
    EXPECT_EQ(trace(table_, {x_}, function, false, {first.recorded.get()}).match,
              first.recorded.get());
    const TraceResult on_shapes = trace(table_, {x_}, function, false);
    EXPECT_EQ(on_shapes.recorded->to_string(), first.recorded->to_string());
    EXPECT_EQ(saved_graph_from_json(graph_to_json(*first.recorded), "here").graph.to_string(),
              first.recorded->to_string());
  }

  /// h, and the slope of its cubes.
  Tensors penalty(const torch::Tensor& x, double factor = 1) {
    auto h = net_(x);
    auto y = (h.pow(3) * factor).sum();
    return {h, grad({y}, {h}, {}, true, true)[0]};
  }

  Net net_;
  TensorTable table_;
  torch::Tensor x_ = torch::randn({4, 4});
};

TEST_F(Differentiate, WithRespectToAResult) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    const Tensors both = penalty(in[0]);
    auto loss = both[0].mean() + both[1].pow(2).sum();
    backward(loss);
    return {loss, both[1]};
  });
}

TEST_F(Differentiate, WithRespectToParameters) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto y = net_(in[0]).pow(3).mean();
    auto slopes = grad({y}, net_->parameters(), {}, true, true);
    auto loss = y;
    for (const auto& slope : slopes) loss = loss + slope.pow(2).sum();
    backward(loss);
    return {loss, slopes[0], slopes[3]};
  });
}

/// It is the tensor that it was, in another shape, and has its history.
TEST_F(Differentiate, WithRespectToWhatGotAnotherShapeUnderNoGrad) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto h = torch::addmm(in[0].detach(), net_->fc->weight, net_->fc->weight);
    auto scaled = h * -6;
    {
      const torch::NoGradGuard no_grad;
      h.unsqueeze_(0);
    }
    auto slope = grad({scaled.pow(2).sum()}, {h}, {}, true, true, true)[0];
    EXPECT_TRUE(slope.defined());
    auto loss = slope.pow(2).sum();
    backward(loss);
    return {loss, slope};
  });
}

TEST_F(Differentiate, WithRespectToAnInputTwice) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto x = in[0].detach().requires_grad_();
    auto y = net_(x);
    auto first = grad({y.sum()}, {x}, {}, true, true)[0];
    auto second = grad({first.sum()}, {x}, {}, true, true)[0];
    auto loss = (second + y).pow(2).mean();
    backward(loss);
    return {loss, second};
  });
}

TEST_F(Differentiate, WithRespectToWhatTheFunctionMakes) {
  for (const bool random : {false, true}) {
    expect_equals_eager([&](const Tensors& in) -> Tensors {
      const auto options = torch::TensorOptions().requires_grad(true);
      auto shift = random ? torch::randn({4}, options) : torch::zeros({4}, options);
      auto slope = grad({net_(in[0] + shift).pow(2).sum()}, {shift}, {}, true, true)[0];
      auto loss = slope.pow(2).sum();
      backward(loss);
      return {loss};
    });
  }
}

TEST_F(Differentiate, GivenGradientsAndNoSecondOrder) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]);
    auto y = h.exp();
    auto slope = grad({y, h * 2}, {h}, {torch::ones_like(y), in[0]}, /*retain_graph=*/true)[0];
    EXPECT_FALSE(slope.requires_grad());
    auto loss = (y * slope).mean();
    backward(loss);
    return {loss, slope};
  });
}

TEST_F(Differentiate, NothingIsTrained) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    const Tensors both = penalty(in[0]);
    return {both[0].detach(), both[1].detach()};
  });
}

TEST_F(Differentiate, AnUnusedInputHasNoGradient) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]);
    auto other = h.exp();
    auto fresh = torch::ones({4}, torch::requires_grad());  // no operator reads it
    auto slopes = grad({h.pow(2).sum()}, {other, fresh, h}, {}, true, true, /*allow_unused=*/true);
    EXPECT_FALSE(slopes[0].defined());
    EXPECT_FALSE(slopes[1].defined());
    auto loss = slopes[2].pow(2).sum() + other.mean();
    backward(loss);
    return {loss};
  });
  for (const bool execute : {true, false}) {
    const Function function = [&](const Tensors& in) -> Tensors {
      auto h = net_(in[0]);
      return grad({h.sum()}, {h.exp()}, {}, true, true);
    };
    const std::string text =
        smp::testing::error_of<Error>([&] { trace(table_, {x_}, function, execute); });
    EXPECT_THAT(text, HasSubstr("step function \"train\", in or after module \"norm\": "));
    EXPECT_THAT(text, HasSubstr("of the differentiated Tensors appears to not have been used"));
  }
}

TEST_F(Differentiate, AfterAWriteInPlace) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]) * 1;
    auto row = h[1];
    row.mul_(in[0][0]);
    auto slopes = grad({h.pow(3).sum()}, {h, row}, {}, true, true, true);
    auto loss = slopes[0].pow(2).sum();
    backward(loss);
    return {loss, slopes[0]};
  });
}

/// A branch that asks a tensor whether it requires a gradient goes the way of eager code, on data,
/// on shapes and under the guard.
TEST_F(Differentiate, OfMemoryThatAViewGaveAHistory) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto base = in[0] * 1;
    auto apart = base.detach();
    auto row = base[0];
    row.copy_(net_->fc->bias);
    EXPECT_TRUE(base.requires_grad());
    EXPECT_FALSE(apart.requires_grad());
    auto slope = grad({base.pow(3).sum()}, {base}, {}, true, true)[0];
    auto loss = slope.pow(2).sum() + apart.sum();
    backward(loss);
    return {loss};
  });
}

TEST_F(Differentiate, OfMemoryThatABufferGaveAHistory) {
  net_->register_buffer("mean", torch::zeros({4}));
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto mean = net_->named_buffers()["mean"];
    mean.copy_(net_->fc->bias);
    auto base = torch::rand_like(in[0]);
    base.narrow(0, 1, 2).add_(mean.expand_as(base).narrow(0, 1, 2));
    EXPECT_TRUE(base.requires_grad());
    auto slope = grad({base.pow(3).sum()}, {net_->fc->bias}, {}, true, true)[0];
    mean.detach_();
    auto loss = slope.pow(2).sum();
    backward(loss);
    return {loss};
  });
}

TEST_F(Differentiate, RequiresGradIsTakenBack) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto x = in[0].detach().requires_grad_();
    auto slope = grad({net_(x).sum()}, {x}, {}, true, true)[0];
    x.requires_grad_(false);
    auto y = x * 2;
    EXPECT_FALSE(y.requires_grad());
    auto loss = (slope * y).sum();
    backward(loss);
    return {loss};
  });
}

/// A run on data lets go of tensors that the function cannot reach any more, and of nothing else.
TEST_F(Differentiate, AVariableIsReadAgainMuchLater) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto x = in[0].detach().requires_grad_();
    auto h = net_(x);
    for (int i = 0; i < 150; ++i) h = h * 0.99;
    auto slope = grad({(h * x).sum()}, {x}, {}, true, true)[0];
    auto loss = slope.pow(2).sum() + x.sum();
    backward(loss);
    return {loss, slope};
  });
}

TEST_F(Differentiate, OfABufferThatWasAnOutBefore) {
  net_->register_buffer("state", torch::zeros({4, 4}));
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto state = net_->named_buffers()["state"];
    auto part = state.narrow(0, 0, 2);
    torch::mul_out(part, in[0].narrow(0, 0, 2), in[0].narrow(0, 1, 2));
    auto h = net_(in[0]);
    part.copy_(h.narrow(0, 2, 2));
    auto slope = grad({(state * 2).pow(3).sum()}, {h}, {}, true, true)[0];
    state.detach_();
    auto loss = slope.pow(2).sum();
    backward(loss);
    return {loss, slope};
  });
}

/// A buffer has the history that it is given until the function returns.
TEST_F(Differentiate, WithRespectToABufferThatTheFunctionWrites) {
  auto state = net_->register_buffer("state", torch::zeros({4, 4}));
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    EXPECT_FALSE(state.requires_grad());
    auto before = state * 2;
    state.copy_(net_(in[0]));
    EXPECT_TRUE(state.requires_grad());
    auto y = (state.exp() + before).sum();
    auto slope = grad({y}, {state}, {}, true, true)[0];
    auto row = state[1];
    state.detach_();
    EXPECT_FALSE(state.requires_grad());
    auto loss = y + slope.pow(2).sum() + (net_(in[0]) * state).sum();
    auto last = state + row;
    backward(loss);
    return {loss, slope, last};
  });
  EXPECT_FALSE(state.requires_grad());
}

TEST_F(Differentiate, ABufferIsWrittenThroughAViewAndItsHistoryEndsWithTheRun) {
  auto state = net_->register_buffer("state", torch::zeros({4, 4}));
  const auto function = [&](const Tensors& in) -> Tensors {
    auto row = state[1];
    row.copy_(net_(in[0])[2]);
    EXPECT_TRUE(state.requires_grad());
    auto slope = grad({state.exp().sum()}, {state}, {}, true, true)[0];
    auto loss = slope.sum();
    backward(loss);
    if (Tracer::current() == nullptr) state.detach_();
    return {loss, slope};
  };
  expect_equals_eager(function);
  EXPECT_FALSE(state.requires_grad());
  for (const bool execute : {true, false}) {
    EXPECT_ANY_THROW(trace(
        table_, {x_},
        [&](const Tensors& in) -> Tensors {
          function(in);
          throw std::runtime_error("a bug of the user's");
        },
        execute));
    EXPECT_FALSE(state.requires_grad());
  }
}

/// A leaf works on the buffer itself, which has no history then but that of the value that enters.
TEST_F(Differentiate, ALeafReadsABufferThatGotAHistory) {
  auto state = net_->register_buffer("state", torch::zeros({4, 4}));
  const auto leaf = [&](const torch::Tensor& x) {
    auto call = c10::make_intrusive<LeafCall>();
    call->module = "reader";
    call->state = {state};
    call->function = [&](LeafCall&, const Tensors& inputs) -> Tensors {
      return {inputs[0] * state};
    };
    return call_leaf(call, {x})[0];
  };
  const auto function = [&](const Tensors& in) -> Tensors {
    state.copy_(net_(in[0]));
    state.mul_(2);
    auto loss = leaf(in[0]).sum() + state.sum();
    EXPECT_TRUE(state.requires_grad());
    backward(loss);
    return {loss};
  };
  // On data and on shapes; a replay here would write a copy of the buffer, which the leaf does not
  // see.
  const TensorTable table = table_of(*net_);
  const TraceResult first = trace(table, {x_}, function);
  EXPECT_FALSE(state.requires_grad());
  EXPECT_EQ(trace(table, {x_}, function, /*execute=*/false).recorded->to_string(),
            first.recorded->to_string());
  EXPECT_FALSE(state.requires_grad());
}

/// After the write `base` is another tensor for autograd than the one that was used before.
TEST_F(Differentiate, WithRespectToWhatAListOperatorWroteSince) {
  expect_equals_eager([&](const Tensors& in) -> Tensors {
    auto base = in[0] * 1;
    auto row = base[0];
    row.copy_(net_->fc->bias);
    auto y = base * 2;
    at::_foreach_add_(Tensors{row}, 1);
    auto slopes = grad({y.pow(2).sum()}, {base, net_->fc->bias}, {}, true, true, true);
    EXPECT_FALSE(slopes[0].defined());
    auto loss = slopes[1].sum() + base.sum();
    backward(loss);
    return {loss, slopes[1]};
  });
}

TEST_F(Differentiate, UnderAutocast) {
  expect_replay_equals_eager(*net_, {x_}, {torch::randn({4, 4})},
                             [&](const Tensors& in) -> Tensors {
                               at::autocast::set_autocast_enabled(at::kCPU, true);
                               const auto end = c10::make_scope_exit([] {
                                 at::autocast::clear_cache();
                                 at::autocast::set_autocast_enabled(at::kCPU, false);
                               });
                               auto h = net_->fc(in[0]);
                               auto slope = grad({net_->fc(h).sum()}, {h}, {}, true, true)[0];
                               auto loss = slope.to(torch::kFloat).pow(2).sum();
                               backward(loss);
                               return {loss, slope};
                             });
}

/// On shapes autocast's operators run on zeros, whose results have a history of shapes only.
TEST_F(Differentiate, UnderAutocastOnShapes) {
  const Function function = [&](const Tensors& in) -> Tensors {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto end =
        c10::make_scope_exit([] { at::autocast::set_autocast_enabled(at::kCPU, false); });
    auto h = net_->fc(in[0]);
    auto slope = grad({net_->fc(h).sum()}, {h}, {}, true, true)[0];
    auto second = grad({slope.sum()}, {net_->fc->weight}, {}, true, true)[0];
    return {slope, second};
  };
  const TraceResult data = trace(table_, {x_}, function);
  const TraceResult shapes = trace(table_, {x_}, function, false);
  ASSERT_EQ(shapes.recorded->outputs.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    const TensorMeta& expected = data.recorded->values[data.recorded->outputs[i]].meta;
    const TensorMeta& got = shapes.recorded->values[shapes.recorded->outputs[i]].meta;
    EXPECT_EQ(got.sizes, expected.sizes);
    EXPECT_EQ(got.dtype, expected.dtype);
    EXPECT_EQ(got.requires_grad, expected.requires_grad);
  }
}

TEST_F(Differentiate, RequiresGradIsAskedForUnderAutocast) {
  const Function function = [&](const Tensors& in) -> Tensors {
    auto x = in[0].detach().requires_grad_();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    auto y = x.tril();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_TRUE(y.requires_grad());
    backward(x.sum());
    return {y};
  };
  expect_equals_eager(function);
}

// -- The guard

TEST_F(Differentiate, ANumberBeforeItMayChange) {
  double factor = 1;
  const Function function = [&](const Tensors& in) -> Tensors {
    auto loss = penalty(in[0], factor)[1].pow(2).sum();
    backward(loss);
    return {loss};
  };
  const TraceResult first = trace(table_, {x_}, function);
  factor = 0.5;
  const TraceResult next = trace(table_, {x_}, function, false, {first.recorded.get()});
  ASSERT_EQ(next.match, first.recorded.get());
  const Replayed replayed = replay(*first.recorded, table_, {x_}, {}, next.constants);
  net_->zero_grad();
  EXPECT_TRUE(torch::equal(replayed.outputs[0], function({x_})[0]));
  EXPECT_TRUE(torch::equal(replayed.gradients.at("fc.weight"), net_->fc->weight.grad()));
}

TEST_F(Differentiate, AnotherCallIsAnotherGraph) {
  bool create_graph = true;
  bool of_exp = false;
  const Function function = [&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]);
    auto other = h.exp();
    auto slope = grad({of_exp ? other.sum() : h.sum()}, {h}, {}, true, create_graph)[0];
    return {slope, other};
  };
  const TraceResult first = trace(table_, {x_}, function);
  const auto difference = [&] {
    const TraceResult next = trace(table_, {x_}, function, false, {first.recorded.get()});
    EXPECT_EQ(next.match, nullptr);
    return next.difference;
  };
  create_graph = false;
  EXPECT_THAT(difference(), HasSubstr("(smp::grad) has another constant as argument"));
  create_graph = of_exp = true;
  EXPECT_THAT(difference(), HasSubstr("has other tensors as argument"));
}

/// Values verified so far get their history when the call needs it.
TEST_F(Differentiate, AfterLeavingAKnownGraph) {
  bool other = false;
  const Function function = [&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]);
    auto y = other ? torch::sigmoid(h) : h;
    auto slopes = grad({y.pow(3).sum()}, {h, net_->fc->weight}, {}, true, true);
    auto loss = slopes[0].pow(2).sum() + slopes[1].sum();
    backward(loss);
    return {loss, slopes[0]};
  };
  const TraceResult first = trace(table_, {x_}, function);
  other = true;
  const TraceResult next = trace(table_, {x_}, function, false, {first.recorded.get()});
  ASSERT_NE(next.recorded, nullptr);
  EXPECT_EQ(next.recorded->to_string(), trace(table_, {x_}, function).recorded->to_string());
}

/// A gradient that is a view of the one it was given is made again as one, though the call has let
/// its history go.
TEST_F(Differentiate, LeftAfterACallThatKeepsNoHistory) {
  bool other = false;
  const Function function = [&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]);
    auto k = net_(in[0] + 1);
    auto slopes = grad({h.exp().sum() + k.sum()}, {h, k});
    auto later = torch::zeros({4, 4});
    later.copy_(other ? in[0].sin() : in[0].cos());
    return {(slopes[0] * slopes[1] * later).detach()};
  };
  const TraceResult first = trace(table_, {x_}, function);
  other = true;
  const TraceResult next = trace(table_, {x_}, function, false, {first.recorded.get()});
  ASSERT_NE(next.recorded, nullptr);
  EXPECT_EQ(next.recorded->to_string(), trace(table_, {x_}, function).recorded->to_string());
}

// -- Consequences

TEST_F(Differentiate, TheOperatorsStayTogether) {
  const TraceResult traced = trace(table_, {x_}, [&](const Tensors& in) -> Tensors {
    auto h = net_(in[0]);
    auto y = h.pow(3).sum();
    auto loss = grad({y}, {h}, {}, true, true)[0].exp().sum();
    backward(loss);
    return {loss};
  });
  const Graph& graph = *traced.recorded;
  const auto ranges = differentiated_ranges(graph);
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(graph.operators[ranges[0].first].name(), "aten::pow.Tensor_Scalar");
  EXPECT_EQ(graph.operators[ranges[0].last].name(), "smp::grad");
  const std::vector<bool> legal = partitioner::legal_cuts(graph);
  for (int i = 0; i < static_cast<int>(legal.size()); ++i) {
    EXPECT_EQ(legal[i], i < ranges[0].first || i >= ranges[0].last) << i;
  }
  const std::string last = std::to_string(ranges[0].last);
  const std::string first = std::to_string(ranges[0].first);
  EXPECT_EQ(partitioner::why_illegal(graph, ranges[0].first),
            "autograd::grad (operator " + last +
                " (smp::grad)) differentiates what is computed "
                "from operator " +
                first + " (aten::pow.Tensor_Scalar) on, so they stay together");
  EXPECT_THAT(*why_not_repeatable(graph, ranges, {ranges[0].first}),
              HasSubstr("autograd::grad, operator " + last + ", needs in the forward pass what"));
  EXPECT_EQ(why_not_repeatable(graph, ranges, {ranges[0].first - 1}), std::nullopt);
  EXPECT_THAT(nn::rewrite::why_not_together(graph),
              ::testing::Optional(HasSubstr("differentiates the operators of one microbatch")));
}

TEST_F(Differentiate, ThroughALeafIsRefused) {
  const auto leaf = [&](const torch::Tensor& x) {
    auto call = c10::make_intrusive<LeafCall>();
    call->module = "fc";
    call->state = net_->fc->parameters();
    call->function = [&](LeafCall&, const Tensors& inputs) -> Tensors {
      return {net_->fc(inputs[0])};
    };
    return call_leaf(call, {x})[0];
  };
  for (const bool execute : {true, false}) {
    const std::string text = refusal(
        table_, {x_},
        [&](const Tensors& in) -> Tensors {
          auto h = in[0].detach().requires_grad_();
          return grad({leaf(h * 2).sum()}, {h}, {}, true, true, /*allow_unused=*/true);
        },
        execute);
    EXPECT_THAT(text, HasSubstr("autograd::grad goes back through leaf module \"fc\""));
    EXPECT_THAT(text, HasSubstr("Call autograd::grad inside the leaf"));
    trace(
        table_, {x_},
        [&](const Tensors& in) -> Tensors {
          auto h = in[0].detach().requires_grad_();
          auto slope = grad({(h * leaf(in[0]) * leaf(h).detach()).sum()}, {h}, {}, true, true);
          return {leaf(slope[0])};
        },
        execute);
  }
}

TEST_F(Differentiate, AfterBackwardIsRefused) {
  for (const bool execute : {true, false}) {
    const std::string text = refusal(
        table_, {x_},
        [&](const Tensors& in) -> Tensors {
          auto h = net_(in[0]);
          backward(h.sum());
          return grad({h.sum()}, {h});
        },
        execute);
    EXPECT_THAT(text, HasSubstr("autograd::grad was called after backward"));
  }
}

TEST_F(Differentiate, BackwardOfATensorIsRefused) {
  for (const bool execute : {true, false}) {
    const std::string text = refusal(
        table_, {x_},
        [&](const Tensors& in) -> Tensors {
          net_(in[0]).sum().backward();
          return {};
        },
        execute);
    EXPECT_THAT(text, HasSubstr("backward() was called inside it"));
    EXPECT_THAT(text, HasSubstr("call model->backward(loss) instead, or torch::autograd::grad"));
  }
}

}  // namespace
}  // namespace smp::graph::testing
