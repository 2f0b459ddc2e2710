// SPDX-License-Identifier: Apache-2.0
// Gradients: histories and hooks that operators do not make, and backwards that no pipeline runs.
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/jit.h>

#include "core/node.h"
#include "graph/leaf.h"
#include "tests/graph/refusal.h"

namespace smp::graph::testing {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Custom functions of each kind: a new result, its input itself, its input changed in place, two
/// results.
struct CubeFunction : torch::autograd::Function<CubeFunction> {
  static torch::Tensor forward(AutogradContext*, torch::Tensor x) { return x.pow(3); }
  static variable_list backward(AutogradContext*, variable_list g) { return {g[0]}; }
};

struct ReverseGradient : torch::autograd::Function<ReverseGradient> {
  static torch::Tensor forward(AutogradContext*, torch::Tensor x) { return x; }
  static variable_list backward(AutogradContext*, variable_list g) { return {-g[0]}; }
};

struct ClampInPlace : torch::autograd::Function<ClampInPlace> {
  static torch::Tensor forward(AutogradContext* context, torch::Tensor x) {
    context->mark_dirty({x});
    return x.clamp_(-1, 1);
  }
  static variable_list backward(AutogradContext*, variable_list g) { return {g[0]}; }
};

struct SplitFunction : torch::autograd::Function<SplitFunction> {
  static variable_list forward(AutogradContext*, torch::Tensor x) { return {x * 2, x.relu()}; }
  static variable_list backward(AutogradContext*, variable_list g) { return {g[0] + g[1]}; }
};

TEST_F(Refusal, CustomAutogradFunctions) {
  const auto cube = text([&](torch::Tensor x) { CubeFunction::apply(net_(x)).sum(); });
  EXPECT_CONTAINS(cube, "in or after module \"fc\"");
  EXPECT_CONTAINS(cube, "the custom autograd function smp::graph::testing::");
  EXPECT_CONTAINS(cube, "CubeFunction, whose backward cannot be captured");
  EXPECT_CONTAINS(cube, "a leaf: smp::leaf(module)(x)");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { ReverseGradient::apply(net_(x)).sum(); }),
                  "ReverseGradient");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { ClampInPlace::apply(net_(x)).sum(); }),
                  "ClampInPlace");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { SplitFunction::apply(net_(x))[1].sum(); }),
                  "SplitFunction");
}

TEST_F(Refusal, CustomAutogradFunctionsWhoseResultNoOperatorReads) {
  const Tensors inputs{torch::randn({4, 4})};
  const auto returned = [&](const Tensors& in) -> Tensors {
    return {CubeFunction::apply(net_(in[0]))};
  };
  EXPECT_CONTAINS(refusal(table_, inputs, returned), "CubeFunction");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { backward(CubeFunction::apply(net_(x).sum())); }),
                  "CubeFunction");
  // Seen through the tensor that the view was made of.
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    auto y = net_(x);
                    ClampInPlace::apply(y[0]);
                    y.sum();
                  }),
                  "ClampInPlace");
}

TEST_F(Refusal, CustomAutogradFunctionsInAGuardedRun) {
  const Tensors inputs{torch::randn({4, 4})};
  const auto plain = [&](const Tensors& in) -> Tensors {
    auto y = net_(in[0]);
    {
      torch::NoGradGuard no_grad;
      y = y.pow(3);
    }
    return {y.sum()};
  };
  const auto custom = [&](const Tensors& in) -> Tensors {
    return {CubeFunction::apply(net_(in[0])).sum()};
  };
  const TraceResult first = trace(table_, inputs, plain);
  EXPECT_CONTAINS(refusal(table_, inputs, custom, false, {first.recorded.get()}), "CubeFunction");
}

/// Without a gradient to pass on there is no backward to lose.
TEST_F(Refusal, CustomAutogradFunctionsAreFineWhereNothingIsDifferentiated) {
  expect_captured([&](torch::Tensor x) { net_(CubeFunction::apply(x)).sum(); });
  expect_captured([&](torch::Tensor x) {
    torch::NoGradGuard no_grad;
    ReverseGradient::apply(net_(x)).sum();
  });
}

TEST_F(Refusal, HooksOnTensors) {
  const auto hook = [](torch::Tensor gradient) { return gradient * 2; };
  const auto inside = text([&](torch::Tensor x) {
    auto y = net_(x);
    y.register_hook(hook);
    y.sum();
  });
  EXPECT_CONTAINS(inside, "in or after module \"fc\": registers a hook on a tensor");
  EXPECT_CONTAINS(inside, "smp::leaf(module)(x)");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { net_(x).register_hook(hook); }),  // at the end
                  "registers a hook on a tensor");
  expect_captured([&](torch::Tensor x) { net_(x).sum(); });

  const auto handle = net_->fc->weight.register_hook(hook);
  EXPECT_CONTAINS(text([&](torch::Tensor x) { net_(x); }),
                  "parameter \"fc.weight\", which has a hook (register_hook)");
  net_->fc->weight.remove_hook(handle);
  expect_captured([&](torch::Tensor x) { net_(x).sum(); });
}

TEST_F(Refusal, GradientsToRetain) {
  EXPECT_CONTAINS(text([&](torch::Tensor x) { net_(x).retain_grad(); }),
                  "calls retain_grad() on a tensor");
}

TEST_F(Refusal, RequiresGradOfAParameterChangedInside) {
  for (int run = 0; run < 2; ++run) {
    const std::string frozen = refusal(
        table_, {torch::randn({4, 4})},
        [&](const Tensors& in) -> Tensors {
          auto y = net_(in[0]);
          net_->fc->weight.requires_grad_(false);
          return {net_(y)};
        },
        run == 0);
    net_->fc->weight.requires_grad_(true);
    EXPECT_CONTAINS(frozen, "changes parameter \"fc.weight\" by requires_grad_(false)");
    EXPECT_CONTAINS(frozen, "Freeze and unfreeze parameters before the step; weight.detach()");
  }
  const auto state = torch::randn({4});
  table_.add(ValueKind::kBuffer, "state", state);
  for (const bool execute : {true, false}) {
    const std::string led = refusal(
        table_, {torch::randn({4, 4})},
        [&](const Tensors& in) -> Tensors {
          auto y = in[0] * state;
          state.requires_grad_();
          return torch::autograd::grad({(y * state).sum()}, {state});
        },
        execute);
    state.requires_grad_(false);
    EXPECT_CONTAINS(led, "changes buffer \"state\" by requires_grad_(true)");
    EXPECT_CONTAINS(led, "and buffer.detach().requires_grad_() one that does");
  }
  // Before its first use a parameter may be frozen, and detach_() is an operator.
  expect_captured([&](torch::Tensor x) {
    net_->fc->weight.requires_grad_(false);
    net_(x).detach_().mul(2);
    net_->fc->weight.requires_grad_(true);
  });
}

class OwnNode : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
  std::string name() const override { return "OwnNode"; }
};

TEST_F(Refusal, HistoriesMadeByHand) {
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    auto y = x * 2;
                    auto node = core::make_node<OwnNode>();
                    node->add_input_metadata(y);
                    torch::autograd::impl::set_gradient_edge(y, {node, 0});
                    y.sum();
                  }),
                  "got a gradient history from no operator (OwnNode)");
}

TEST_F(Refusal, BackwardInsideTheStep) {
  EXPECT_CONTAINS(text([&](torch::Tensor x) { net_(x).pow(2).sum().backward(); }),
                  "call model->backward(loss) instead");
}

struct AutocastOnCpu {
  AutocastOnCpu() { at::autocast::set_autocast_enabled(at::kCPU, true); }
  ~AutocastOnCpu() { at::autocast::set_autocast_enabled(at::kCPU, false); }
};

TEST_F(Refusal, BackwardsThatGetInEachOthersWay) {
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    auto y = net_(x);
                    backward(y.sum());
                    backward(y.square().sum());
                  }),
                  "backward was called a second time on the history of operator");
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    auto loss = net_(x).sum();
                    backward(loss);
                    backward(loss * 2);
                  }),
                  "which the call before has freed, as in libtorch");
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    auto other = torch::tanh(net_(x));
                    backward(net_(x).sum());
                    other.add_(1);
                    backward(other.sum());
                  }),
                  "between two calls of backward it writes in place a tensor of shape [4, 4] that "
                  "the first may need");
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    backward(net_(x).sum());
                    const auto loss = net_(x).sum();
                    const AutocastOnCpu autocast;
                    backward(loss);
                  }),
                  "backward was called in another mode than before, and the pipeline runs all");
}

TEST_F(Refusal, BackwardWithoutGradient) {
  EXPECT_CONTAINS(text([&](torch::Tensor x) { backward(x.sum()); }),
                  "does not depend on a parameter");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { backward(net_(x)); }), "reduce it to a scalar");
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    auto y = net_(x);
                    Tracer::current()->backward({y, y}, {y});
                  }),
                  "backward got 2 tensors and 1 gradients");
}

/// In the first call as in the later ones, which TorchScript runs in another way.
TEST_F(Refusal, TorchScriptFunctions) {
  const auto script = torch::jit::compile(R"(
def half(x, weight):
    return torch.tanh(torch.matmul(x, weight)) * 0.5
)");
  const auto half = [&](const torch::Tensor& x) {
    return script->run_method("half", x, net_->fc->weight).toTensor();
  };
  for (int call = 0; call < 3; ++call) {
    const std::string refused = text([&](torch::Tensor x) { half(x); });
    EXPECT_CONTAINS(refused, "is called by a TorchScript function, whose backward is not made of");
    EXPECT_CONTAINS(refused, "Write the function with libtorch's operators");
    EXPECT_CONTAINS(refused, "make the module that calls it a leaf: smp::leaf(module)(x)");
    half(torch::randn({4, 4})).sum().backward();
  }
  net_->zero_grad();
  const auto leaf = [&](const torch::Tensor& x) {
    auto call = c10::make_intrusive<LeafCall>();
    call->module = "half";
    call->parameters = 1;
    call->state = {net_->fc->weight};
    call->function = [&](LeafCall&, const Tensors& inputs) -> Tensors { return {half(inputs[0])}; };
    return call_leaf(call, {x})[0];
  };
  expect_replay_equals_eager(*net_, {torch::randn({4, 4})}, {torch::randn({4, 4})},
                             [&](const Tensors& in) -> Tensors {
                               auto loss = leaf(in[0]).sum();
                               backward(loss);
                               return {loss};
                             });
}

TEST_F(Refusal, InputsThatRequireAGradient) {
  EXPECT_CONTAINS(refusal(table_, {torch::randn({2, 4}).requires_grad_()},
                          [&](const Tensors& in) -> Tensors { return {net_(in[0])}; }),
                  "input 0 requires a gradient");
}

}  // namespace
}  // namespace smp::graph::testing
