// SPDX-License-Identifier: Apache-2.0
// Operators that a TORCH_LIBRARY extension defines are captured like libtorch's own.

#include <torch/library.h>

#include "tests/graph/harness.h"

namespace smp::graph::testing {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

torch::Tensor scaled_add(const torch::Tensor& a, const torch::Tensor& b, double scale) {
  return a + b * scale;
}

torch::Tensor& bump_(torch::Tensor& self, const torch::Tensor& other) { return self.add_(other); }

/// Returns nothing, as libtorch's own operators on lists do.
void scale_(torch::Tensor& self, const torch::Tensor& other) { self.mul_(other); }

/// Returns another tensor than the one it writes.
torch::Tensor fold_(torch::Tensor& self, const torch::Tensor& other) {
  self.sub_(other);
  return other.sum();
}

torch::Tensor cube(const torch::Tensor& x) { return x.pow(3); }

/// The usual way to give an operator a backward of its own.
struct Cube : torch::autograd::Function<Cube> {
  static torch::Tensor forward(AutogradContext* context, torch::Tensor x) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x});
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("smp_test::cube", "")
                               .typed<torch::Tensor(const torch::Tensor&)>();
    return op.call(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto x = context->get_saved_variables()[0];
    return {gradients[0] * x * x * 5};  // not the derivative, so that it can be told from it
  }
};

torch::Tensor cube_autograd(const torch::Tensor& x) { return Cube::apply(x); }

TORCH_LIBRARY(smp_test, m) {
  m.def("scaled_add(Tensor a, Tensor b, float scale) -> Tensor", &scaled_add);
  m.def("bump_(Tensor(a!) self, Tensor other) -> Tensor(a!)", &bump_);
  m.def("scale_(Tensor(a!) self, Tensor other) -> ()", &scale_);
  m.def("fold_(Tensor(a!) self, Tensor other) -> Tensor", &fold_);
  m.def("cube(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(smp_test, CPU, m) { m.impl("cube", &cube); }
TORCH_LIBRARY_IMPL(smp_test, Autograd, m) { m.impl("cube", &cube_autograd); }

template <class Signature, class... Arguments>
decltype(auto) call(const char* name, Arguments&&... arguments) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(
      std::forward<Arguments>(arguments)...);
}

struct LibraryNetImpl : torch::nn::Module {
  LibraryNetImpl() { weight = register_parameter("weight", torch::randn({4, 4})); }
  torch::Tensor forward(torch::Tensor x) {
    using torch::Tensor;
    auto y = torch::matmul(x, weight);
    y = call<Tensor(const Tensor&, const Tensor&, double)>("smp_test::scaled_add", y, x, 0.25);
    auto row = y[1];
    call<Tensor&(Tensor&, const Tensor&)>("smp_test::bump_", row, y[0]);
    auto plain = x * 2;  // a write gives it a history
    call<void(Tensor&, const Tensor&)>("smp_test::scale_", plain, y);
    auto other = x * 3;
    const auto sum = call<Tensor(Tensor&, const Tensor&)>("smp_test::fold_", other, y);
    return call<Tensor(const Tensor&)>("smp_test::cube", y) + plain + other * sum;
  }
  torch::Tensor weight;
};
TORCH_MODULE(LibraryNet);

Function loss_of(LibraryNet& net) {
  return [&net](const Tensors& in) -> Tensors {
    auto out = net(in[0]);
    auto loss = out.pow(2).mean();
    backward(loss);
    return {out, loss};
  };
}

TEST(Library, OperatorsOfExtensionsReplayWithTheirGradients) {
  torch::manual_seed(3);
  LibraryNet net;
  expect_replay_equals_eager(*net, {torch::randn({4, 4})}, {torch::randn({4, 4})}, loss_of(net));
}

TEST(Library, OperatorsOfExtensionsAreSeenWholeWithTheirWrites) {
  LibraryNet net;
  const TensorTable table = table_of(*net);
  const Tensors inputs{torch::randn({4, 4})};
  const auto real = trace(table, inputs, loss_of(net));
  const std::string text = real.recorded->to_string();
  for (const char* name : {"smp_test::scaled_add", "smp_test::bump_", "smp_test::scale_",
                           "smp_test::fold_", "smp_test::cube"}) {
    EXPECT_NE(text.find(name), std::string::npos) << text;
  }
  EXPECT_EQ(text.find("aten::add_"), std::string::npos) << "the inside of bump_: " << text;
  for (const Operator& op : real.recorded->operators) {
    const bool writes = op.name().back() == '_';
    EXPECT_EQ(op.writes.size(), writes ? 1u : 0u) << op.name();
    if (!writes) continue;
    // Returned or not, the written tensor is the last result.
    EXPECT_EQ(op.result_is_argument.back(), 0) << op.name();
    EXPECT_TRUE(real.recorded->values[op.results.back()].meta.requires_grad) << op.name();
    EXPECT_EQ(op.results.size(), op.name() == "smp_test::fold_" ? 2u : 1u);
  }
  const auto shapes = trace(table, inputs, loss_of(net), false);
  EXPECT_EQ(shapes.recorded->to_string(), text);
  const auto guarded = trace(table, inputs, loss_of(net), false, {real.recorded.get()});
  EXPECT_EQ(guarded.match, real.recorded.get()) << guarded.difference;
}

}  // namespace
}  // namespace smp::graph::testing
