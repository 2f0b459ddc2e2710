// SPDX-License-Identifier: Apache-2.0
#include "exported/size_formula.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <optional>
#include <vector>

namespace smp::testing {
namespace {

using exported::SizeFormula;
using exported::SizeGrid;

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

using Function = std::function<int64_t(const std::vector<int64_t>&)>;

std::vector<int64_t> seen_by(const SizeGrid& grid, const Function& function) {
  std::vector<int64_t> seen;
  for (size_t i = 0; i < grid.captures(); ++i) seen.push_back(function(grid.sizes(i)));
  return seen;
}

TEST(SizeFormula, IsFoundFromACaptureAtAFewSizes) {
  const std::vector<Function> functions = {
      [](const auto&) { return 7; },
      [](const auto&) { return 0; },
      [](const auto& s) { return s[0]; },
      [](const auto& s) { return 3 * s[1] + 2; },
      [](const auto& s) { return s[0] * s[1] - s[1]; },
      [](const auto& s) { return 2 * s[0] * s[0] * s[1] + s[1] * s[1] + s[0] + 1; },
  };
  const SizeGrid grid({{6, 1, kAny}, {5, 2, 9}});
  for (const Function& function : functions) {
    const std::optional<SizeFormula> formula = grid.fit(seen_by(grid, function));
    ASSERT_TRUE(formula.has_value());
    for (const std::vector<int64_t>& sizes :
         std::vector<std::vector<int64_t>>{{6, 5}, {1, 2}, {100, 9}, {17, 3}}) {
      EXPECT_EQ(formula->evaluate(sizes), function(sizes)) << formula->to_srepr();
    }
  }
}

TEST(SizeFormula, ThereIsNoneForDivisionsAndHighPowers) {
  const SizeGrid grid({{6, 1, kAny}});
  EXPECT_FALSE(grid.fit(seen_by(grid, [](const auto& s) { return s[0] / 4; })).has_value());
  EXPECT_FALSE(
      grid.fit(seen_by(grid, [](const auto& s) { return s[0] * s[0] * s[0]; })).has_value());
}

TEST(SizeFormula, IsWrittenAsSympyDoes) {
  const SizeGrid grid({{6, 1, kAny}, {5, 2, 9}});
  const auto text = [&](const Function& function) {
    return grid.fit(seen_by(grid, function))->to_srepr();
  };
  EXPECT_EQ(text([](const auto&) { return -4; }), "Integer(-4)");
  EXPECT_EQ(text([](const auto& s) { return s[1]; }), "Symbol('s1', positive=True, integer=True)");
  EXPECT_EQ(text([](const auto& s) { return 2 * s[0] * s[0] + 1; }),
            "Add(Integer(1), Mul(Integer(2), Symbol('s0', positive=True, integer=True), "
            "Symbol('s0', positive=True, integer=True)))");
}

TEST(SizeGrid, StaysInTheRangesAndBeginsWithTheSizesGiven) {
  const SizeGrid grid({{6, 1, kAny}, {5, 2, 6}});
  EXPECT_EQ(grid.sizes(0), (std::vector<int64_t>{6, 5}));
  for (size_t i = 0; i < grid.captures(); ++i) {
    EXPECT_GE(grid.sizes(i)[1], 2);
    EXPECT_LE(grid.sizes(i)[1], 6);
    EXPECT_EQ(grid.sizes(i)[0] % 6, 0);
  }
  EXPECT_EQ(SizeGrid().captures(), 1u);
  EXPECT_EQ(SizeGrid({{2, 1, 2}}).captures(), 1u);
}

}  // namespace
}  // namespace smp::testing
