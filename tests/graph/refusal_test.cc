#include "tests/graph/harness.h"

namespace smp::graph::testing {
namespace {

using ::testing::Test;

class Refusal : public Test {
 protected:
  Refusal() { table_ = table_of(*net_); }

  std::string text(const std::function<void(torch::Tensor)>& body) {
    return refusal(table_, {torch::randn({4, 4})}, [&](const Tensors& in) -> Tensors {
      body(in[0]);
      return {};
    });
  }

  struct NetImpl : torch::nn::Module {
    torch::nn::Linear fc{nullptr};
    NetImpl() { fc = register_module("fc", torch::nn::Linear(4, 4)); }
    torch::Tensor forward(torch::Tensor x) { return fc(x); }
  };
  TORCH_MODULE(Net);

  Net net_;
  TensorTable table_;
};

#define EXPECT_CONTAINS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "the text was: " << (text)

TEST_F(Refusal, HostReads) {
  const auto item = text([&](torch::Tensor x) { net_(x).sum().item<float>(); });
  EXPECT_CONTAINS(item, "step function \"train\", in or after module \"fc\": operator aten::item");
  EXPECT_CONTAINS(item, "return the tensor from the step and read it there");
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    if (x.is_nonzero()) net_(x);
                  }),
                  "aten::is_nonzero");
}

struct CubeFunction : torch::autograd::Function<CubeFunction> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, torch::Tensor x) {
    return x.pow(3);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list g) {
    return {g[0]};
  }
};

TEST_F(Refusal, EqualOfDifferentTensorsButNotOfTheSame) {
  EXPECT_CONTAINS(text([&](torch::Tensor x) { torch::equal(x, x.clone()); }), "aten::equal");
  const auto traced = trace(table_, {torch::randn({4, 4})}, [&](const Tensors& in) -> Tensors {
    EXPECT_TRUE(torch::equal(in[0], in[0]));
    EXPECT_FALSE(torch::equal(in[0], in[0][0]));
    return {net_(in[0])};
  });
  EXPECT_GT(traced.recorded->operators.size(), 0u);
}

TEST_F(Refusal, ResultShapesThatDependOnData) {
  EXPECT_CONTAINS(text([](torch::Tensor x) { torch::nonzero(x); }), "aten::nonzero");
  EXPECT_CONTAINS(text([](torch::Tensor x) { x.index({x > 0}); }), "aten::index");
}

TEST_F(Refusal, CustomAutogradFunctions) {
  EXPECT_CONTAINS(text([&](torch::Tensor x) { CubeFunction::apply(net_(x)).sum(); }),
                  "custom autograd function");
}

TEST_F(Refusal, HiddenStateAndForeignParameters) {
  auto state = torch::zeros({4, 4});
  EXPECT_CONTAINS(text([&](torch::Tensor x) { state.add_(x); }), "(hidden state)");
  auto weight = torch::randn({4, 4}).requires_grad_();
  EXPECT_CONTAINS(text([&](torch::Tensor x) { x.matmul(weight); }),
                  "a parameter of shape [4, 4] that belongs to no DistributedModel");
  auto computed = net_(torch::randn({4, 4}));
  EXPECT_CONTAINS(text([&](torch::Tensor x) { x.add(computed); }),
                  "computed outside the step function");
}

TEST_F(Refusal, WritesToParametersAndReadsOfGradients) {
  EXPECT_CONTAINS(text([&](torch::Tensor) {
                    torch::NoGradGuard no_grad;
                    net_->fc->weight.mul_(0.9);
                  }),
                  "aten::mul_.Scalar writes parameter \"fc.weight\"");
  net_(torch::randn({4, 4})).sum().backward();
  EXPECT_CONTAINS(text([&](torch::Tensor x) { x.add(net_->fc->weight.grad()); }),
                  "reads the gradient of parameter \"fc.weight\"");
}

TEST_F(Refusal, BackwardInsideTheStep) {
  EXPECT_CONTAINS(text([&](torch::Tensor x) { net_(x).pow(2).sum().backward(); }),
                  "call model->backward(loss) instead");
  // On shapes as well, where there is no history to run.
  try {
    trace(
        table_, {torch::randn({4, 4})},
        [&](const Tensors& in) -> Tensors {
          net_(in[0]).pow(2).sum().backward();
          return {};
        },
        false);
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_CONTAINS(std::string(error.what()), "call model->backward(loss) instead");
  }
}

TEST_F(Refusal, SecondBackwardAndBackwardWithoutGradient) {
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    auto loss = net_(x).sum();
                    backward(loss);
                    backward(loss);
                  }),
                  "backward was called a second time");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { backward(x.sum()); }),
                  "does not depend on a parameter");
  EXPECT_CONTAINS(text([&](torch::Tensor x) { backward(net_(x)); }), "reduce it to a scalar");
}

TEST_F(Refusal, ExplicitGenerators) {
  auto generator = at::detail::createCPUGenerator(3);
  EXPECT_CONTAINS(text([&](torch::Tensor x) {
                    x.add(torch::randn({4, 4}, generator));
                  }),
                  "draws from an explicit generator");
}

TEST_F(Refusal, TensorsThatEscaped) {
  torch::Tensor kept;
  const auto keep = [&](const Tensors& in) -> Tensors {
    kept = in[0] * 2;
    return {kept};
  };
  const Tensors inputs{torch::randn({4, 4})};
  trace(table_, inputs, keep, false);
  EXPECT_CONTAINS(text([&](torch::Tensor x) { x.add(kept); }),
                  "escaped from an earlier run of a step function");
}

TEST_F(Refusal, InputsThatRequireAGradient) {
  EXPECT_CONTAINS(refusal(table_, {torch::randn({2, 4}).requires_grad_()},
                          [&](const Tensors& in) -> Tensors { return {net_(in[0])}; }),
                  "input 0 requires a gradient");
}

}  // namespace
}  // namespace smp::graph::testing
