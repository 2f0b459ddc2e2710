// SPDX-License-Identifier: Apache-2.0
#include "tests/covering_array.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace smp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// All combinations of values "0" to "size - 1" of each factor.
std::vector<Factors> product(const std::vector<int>& sizes) {
  std::vector<Factors> all{{}};
  for (int size : sizes) {
    std::vector<Factors> longer;
    for (const Factors& one : all) {
      for (int value = 0; value < size; ++value) {
        longer.push_back(one);
        longer.back().push_back(std::to_string(value));
      }
    }
    all = longer;
  }
  return all;
}

/// How many of `all` are chosen, having compared their pairs with those of all, one by one.
size_t checked_size(const std::vector<Factors>& all) {
  const std::set<size_t> chosen = cover_pairs(all);
  for (const Factors& factors : all) {
    for (size_t i = 0; i < factors.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        const bool held = std::any_of(chosen.begin(), chosen.end(), [&](size_t k) {
          return all[k][i] == factors[i] && all[k][j] == factors[j];
        });
        EXPECT_TRUE(held) << "factors " << j << " and " << i << ": " << factors[j] << ", "
                          << factors[i];
      }
    }
  }
  return chosen.size();
}

TEST(CoveringArray, HoldsEveryPairOfAProduct) {
  EXPECT_EQ(checked_size(product({3, 4})), 12u) << "of two factors that is all";
  EXPECT_EQ(checked_size(product({2, 2, 2})), 4u);
  EXPECT_LE(checked_size(product({4, 3, 2, 2})), 14u) << "of 48";
  EXPECT_LE(checked_size(product({5, 4, 3, 3, 2})), 26u) << "of 360";
}

TEST(CoveringArray, HoldsEveryPairThatExists) {
  std::vector<Factors> all = product({4, 3, 4});
  all.erase(std::remove_if(all.begin(), all.end(),
                           [](const Factors& one) { return one[0] == "1" && one[2] != "2"; }),
            all.end());
  EXPECT_LT(checked_size(all), all.size() / 2);
}

TEST(CoveringArray, TellsFactorsWithEqualValuesApart) {
  EXPECT_THAT(cover_pairs({{"a", "b"}, {"b", "a"}, {"a", "b"}}), ElementsAre(0, 1));
  EXPECT_THAT(cover_pairs({}), IsEmpty());
}

TEST(CoveringArray, IsTheWholeProductOnRequest) {
  const std::vector<Factors> all = product({2, 2, 2});
  const auto itself = [](const Factors& factors) { return factors; };
  unsetenv("SMP_FULL_PRODUCT");
  EXPECT_EQ(cases_of(all, itself).size(), 4u);
  setenv("SMP_FULL_PRODUCT", "1", 1);
  EXPECT_EQ(cases_of(all, itself), all);
}

}  // namespace
}  // namespace smp::testing
