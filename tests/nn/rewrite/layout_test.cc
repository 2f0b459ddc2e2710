// SPDX-License-Identifier: Apache-2.0
// The algebra of layouts against brute force: which elements of a tensor a rank has.

#include "nn/rewrite/layout.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

#include "smp/nn/parameter_split.h"

namespace smp::nn::rewrite {
namespace {

/// The numbers, in row-major order, of the elements that rank 1 has.
torch::Tensor numbers(const std::vector<int64_t>& sizes, const Layout& layout, int ranks) {
  const ParameterSplit split{sizes, layout.dim, layout.blocks, ranks};
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return split.part(torch::arange(count).view(sizes), 1).flatten();
}

/// All layouts in which a tensor can be divided.
std::vector<Layout> layouts_of(const std::vector<int64_t>& sizes, int ranks) {
  std::vector<Layout> layouts;
  for (int dim = 0; dim < static_cast<int>(sizes.size()); ++dim) {
    for (int64_t blocks = 1; blocks <= sizes[dim]; ++blocks) {
      if (can_divide(sizes, dim, blocks, ranks)) layouts.push_back(Layout::divided(dim, blocks));
    }
  }
  return layouts;
}

/// A way to write `count` as a product.
std::vector<int64_t> factors(int64_t count, std::mt19937& random) {
  std::vector<int64_t> sizes;
  while (count > 1 && sizes.size() < 5) {
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= count; ++d) {
      if (count % d == 0) divisors.push_back(d);
    }
    const int64_t next = divisors[random() % divisors.size()];
    sizes.push_back(next);
    count /= next;
  }
  sizes.push_back(count);
  return sizes;
}

TEST(LayoutTest, ViewsKeepTheElementsOfEachRank) {
  std::mt19937 random(5);
  int found = 0, lost = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const int ranks = trial % 3 == 0 ? 3 : 2;
    const int64_t count = std::vector<int64_t>{24, 36, 48, 64, 72, 96}[random() % 6];
    const auto from = factors(count, random), to = factors(count, random);
    for (const Layout& layout : layouts_of(from, ranks)) {
      const auto expected = numbers(from, layout, ranks);
      const auto viewed = through_view(from, layout, to, ranks);
      if (viewed) {
        ++found;
        ASSERT_TRUE(viewed->is_divided());
        EXPECT_TRUE(torch::equal(numbers(to, *viewed, ranks), expected))
            << at::IntArrayRef(from) << " " << layout.to_string() << " to " << at::IntArrayRef(to);
        continue;
      }
      ++lost;
      for (const Layout& other : layouts_of(to, ranks)) {
        EXPECT_FALSE(torch::equal(numbers(to, other, ranks), expected))
            << at::IntArrayRef(from) << " " << layout.to_string() << " is " << at::IntArrayRef(to)
            << " " << other.to_string();
      }
    }
  }
  EXPECT_GT(found, 100);
  EXPECT_GT(lost, 100);
}

TEST(LayoutTest, LocalViewIsViewOfTheWhole) {
  const Layout layout = Layout::divided(2, 3);  // layout of a fused projection to 4 heads of 5
  const std::vector<int64_t> from = {2, 3, 60}, to = {2, 3, 3, 4, 5};
  const auto viewed = through_view(from, layout, to, 2);
  ASSERT_TRUE(viewed.has_value());
  EXPECT_EQ(*viewed, Layout::divided(3));
  const auto whole = torch::arange(360).view(from);
  const ParameterSplit split{from, 2, 3, 2};
  const ParameterSplit by_head{to, 3, 1, 2};
  EXPECT_TRUE(
      torch::equal(split.part(whole, 1).view({2, 3, 3, 2, 5}), by_head.part(whole.view(to), 1)));
}

TEST(LayoutTest, BatchAndHeadsInOneDimension) {
  const auto viewed = through_view({7, 4, 24}, Layout::divided(2), {7, 4 * 6, 4}, 2);
  ASSERT_TRUE(viewed.has_value());
  EXPECT_EQ(*viewed, Layout::divided(1, 4));
}

TEST(LayoutTest, HeadsThatCannotBeDivided) {
  EXPECT_FALSE(through_view({2, 5, 3 * 12 * 16}, Layout::divided(2, 3), {2, 5, 3, 12, 16}, 8));
  // Nothing can be said of no elements.
  EXPECT_FALSE(through_view({4, 0}, Layout::divided(0), {4, 0, 2}, 2));
  EXPECT_FALSE(through_view({0, 6}, Layout::divided(1), {0}, 2));
  EXPECT_EQ(parts_in_view({2, 5, 3 * 12 * 16}, Layout::divided(2, 3), {2, 5, 3, 12, 16}, 8), 12);
}

TEST(LayoutTest, Text) {
  EXPECT_EQ(Layout::whole().to_string(), "whole");
  EXPECT_EQ(Layout::shared().to_string(), "shared");
  EXPECT_EQ(Layout::partial().to_string(), "partial");
  EXPECT_EQ(Layout::divided(1).to_string(), "divided(1)");
  EXPECT_EQ(Layout::divided(2, 3).to_string(), "divided(2, 3 blocks)");
}

}  // namespace
}  // namespace smp::nn::rewrite
