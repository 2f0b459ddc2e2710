// SPDX-License-Identifier: Apache-2.0
// How tensors lie in memory: copies that kernels cannot tell from them, and captured constants.
#include "graph/memory_layout.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/graph/harness.h"

namespace smp::graph::testing {
namespace {

TEST(MemoryLayout, AlignedCopiesKeepSizesStridesAndValues) {
  const auto base = torch::randn({9, 7});
  const auto odd = base.slice(0, 1);  // starts 28 bytes in
  const auto copy = aligned(odd);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(copy.data_ptr()) % 64, 0u);
  EXPECT_EQ(copy.strides(), odd.strides());
  EXPECT_TRUE(torch::equal(copy, odd));
  const auto expanded = base.slice(0, 1, 2).slice(1, 1, 2).expand({5, 3});
  EXPECT_TRUE(torch::equal(aligned(expanded), expanded));
  EXPECT_EQ(aligned(expanded).strides(), expanded.strides());
  EXPECT_TRUE(aligned(base).is_same(base));
}

/// Whether two indices lead to one element.
TEST(MemoryLayout, SaysWhetherATensorOverlapsItself) {
  const auto overlaps = [](const torch::Tensor& tensor) {
    return overlaps_itself(tensor.sizes(), tensor.strides());
  };
  const auto x = torch::zeros({4, 6});
  for (const auto& plain :
       {x, x.t(), x.slice(1, 0, 6, 2), x.select(1, 2), x.unfold(1, 2, 2), x[0].expand({1, 6}),
        torch::zeros({0, 3}).expand({5, 0, 3}), torch::zeros({})}) {
    EXPECT_FALSE(overlaps(plain)) << plain.sizes() << plain.strides();
  }
  for (const auto& view : {x.unfold(1, 2, 1), x[0].expand({2, 6}), x.as_strided({3, 3}, {2, 2})}) {
    EXPECT_TRUE(overlaps(view)) << view.sizes() << view.strides();
  }
}

/// A matrix in each way in which one may lie.
std::vector<std::pair<std::string, torch::Tensor>> matrices(int64_t rows, int64_t columns) {
  const auto part = [&](int64_t begin) {
    return torch::randn({rows, columns + 5}).narrow(1, begin, columns);
  };
  return {{"dense", torch::randn({rows, columns})},
          {"transposed", torch::randn({columns, rows}).t()},
          {"padded rows", part(0)},
          {"part of wide rows", part(3)},
          {"later rows", torch::randn({rows + 1, columns}).slice(0, 1)},
          {"every second column", torch::randn({rows, 2 * columns}).slice(1, 0, 2 * columns, 2)},
          {"padded columns", torch::randn({columns, rows + 3}).narrow(1, 0, rows).t()},
          {"one of many planes", torch::randn({rows, columns, 20}).select(2, 3)},
          {"one row", torch::randn({1, columns}).expand({rows, columns})},
          {"one column", torch::randn({rows, 1}).expand({rows, columns})},
          {"windows", torch::randn({rows + columns - 1}).unfold(0, columns, 1)}};
}

/// The first run, which captures, reads the constant itself: the replay, a copy.
void expect_same_bits(const std::string& name, const torch::Tensor& input,
                      const torch::Tensor& constant,
                      const std::function<torch::Tensor(torch::Tensor, torch::Tensor)>& function) {
  SCOPED_TRACE(name);
  const Function step = [&](const Tensors& in) -> Tensors { return {function(in[0], constant)}; };
  const auto traced = trace({}, {input}, step);
  for (const Value& value : traced.recorded->values) {
    if (value.kind != ValueKind::kConstant) continue;
    EXPECT_EQ(value.content.strides(), constant.strides());
    EXPECT_EQ(shift_of(value.content), shift_of(constant));
    EXPECT_FALSE(value.content.storage().is_alias_of(constant.storage()));
  }
  EXPECT_TRUE(torch::equal(replay(*traced.recorded, {}, {input}).outputs[0], step({input})[0]));
}

/// Kernels round otherwise on other strides: of these, products with vectors, sums, means, norms
/// and `gelu` did when constants were kept without their gaps.
TEST(Constants, InAnyLayoutGiveTheBitsOfPlainLibtorch) {
  torch::manual_seed(3);
  const auto x = torch::randn({33, 65});
  for (const auto& [name, constant] : matrices(65, 147)) {
    SCOPED_TRACE(name);
    const auto expect = [&, &c = constant](const char* kernel, const auto& function) {
      expect_same_bits(kernel, x, c, function);
    };
    expect("matmul", [](auto in, auto c) { return in.matmul(c); });
    expect("mv", [](auto in, auto c) { return c.t().matmul(in[0]); });
    expect("dot", [](auto in, auto c) { return in[0].dot(c.select(1, 0)); });
    expect("sum", [](auto in, auto c) { return c.sum() + in; });
    expect("sum of columns", [](auto in, auto c) { return c.sum(0) * in[0][0]; });
    expect("sum of rows", [](auto in, auto c) { return c.sum(1) * in[0][0]; });
    expect("mean", [](auto in, auto c) { return c.mean() + in; });
    expect("norm", [](auto in, auto c) { return c.norm() + in; });
    expect("layer_norm", [](auto in, auto c) { return torch::layer_norm(c, {147}) * in[0][0]; });
    expect("softmax", [](auto in, auto c) { return torch::softmax(c, 1) * in[0][0]; });
    expect("gelu", [](auto in, auto c) { return torch::gelu(c) * in[0][0]; });
  }
  const auto images = torch::randn({2, 5, 9, 9});
  for (const auto& kernel :
       {torch::randn({7, 5, 3, 3}).contiguous(torch::MemoryFormat::ChannelsLast),
        torch::randn({7, 9, 3, 3}).narrow(1, 0, 5), torch::randn({5, 7, 3, 3}).transpose(0, 1),
        torch::randn({7, 1, 3, 3}).expand({7, 5, 3, 3})}) {
    expect_same_bits("conv2d", images, kernel,
                     [](auto in, auto c) { return torch::conv2d(in, c); });
  }
}

/// libtorch refuses to write a tensor that shows an element several times.
TEST(ContentScope, PutsExpandedTensorsBack) {
  const auto memory = torch::arange(3.0), before = memory.clone();
  const auto expanded = memory.expand({4, 3});
  {
    const ContentScope scope({expanded, memory.expand({1, 3})});
    memory.fill_(7);
  }
  EXPECT_TRUE(torch::equal(memory, before));
}

/// Lazy conjugates and negatives show other numbers than their memory holds.
TEST(Constants, LazyConjugatesAreOthersThanTheirMemory) {
  torch::manual_seed(3);
  const auto z = torch::randn({4, 3}, torch::kComplexFloat);
  const auto conjugate = z.conj(), negative = torch::imag(conjugate);
  ASSERT_TRUE(negative.is_neg());
  EXPECT_FALSE(same_content(z, conjugate));
  EXPECT_TRUE(same_content(conjugate, conjugate.resolve_conj()));
  EXPECT_TRUE(same_content(negative, negative.resolve_neg()));
  EXPECT_TRUE(same_content(clone_content(conjugate), conjugate));
  EXPECT_TRUE(clone_content(conjugate).is_conj());
  for (const auto& constant : {conjugate, conjugate.t()}) {
    expect_same_bits("conjugate", z, constant,
                     [](auto in, auto c) { return torch::view_as_real(in * c.sum()); });
  }
  expect_same_bits("negative", torch::randn({3}), negative,
                   [](auto in, auto c) { return c.matmul(in); });
}

}  // namespace
}  // namespace smp::graph::testing
