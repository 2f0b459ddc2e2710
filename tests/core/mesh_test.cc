// SPDX-License-Identifier: Apache-2.0
#include "core/mesh.h"

#include <gtest/gtest.h>

#include <vector>

namespace smp::core {
namespace {

/// The ranks of a mesh of 4 x 3 x 2.
const Axis kOuter{6, 4}, kMiddle{2, 3}, kInner{1, 2};
constexpr int kRanks = 24;

TEST(Axis, HasTheRanksThatDifferInOneDigit) {
  for (const Axis& axis : {kOuter, kMiddle, kInner, Axis{4, 3}}) {
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(axis.member(rank, axis.index_of(rank)), rank);
      for (int i = 0; i < axis.size; ++i) {
        const int member = axis.member(rank, i);
        EXPECT_EQ(axis.index_of(member), i);
        EXPECT_EQ(member % axis.stride, rank % axis.stride);
        EXPECT_EQ(member / (axis.stride * axis.size), rank / (axis.stride * axis.size));
      }
    }
  }
}

TEST(Axis, IsSplitIntoNeighboursAndRanksAtOnePlaceAmongThem) {
  for (const int inner : {1, 2, 4}) {
    const auto [near, far] = kOuter.split(inner);
    EXPECT_EQ(near.size, inner);
    EXPECT_EQ(far.size, 4 / inner);
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(far.index_of(rank) * inner + near.index_of(rank), kOuter.index_of(rank));
      for (int i = 0; i < inner; ++i) {
        EXPECT_EQ(near.member(rank, i), kOuter.member(rank, far.index_of(rank) * inner + i));
      }
    }
    EXPECT_EQ(near == kOuter, inner == 4);
  }
}

/// Held against a search of all ranks.
TEST(Axes, FoldSomeOfTheDigits) {
  const std::vector<Axis> all{kOuter, kMiddle, kInner};
  for (unsigned chosen = 0; chosen < 8; ++chosen) {
    Axes axes;
    for (size_t i = 0; i < all.size(); ++i) {
      if ((chosen >> i) & 1U) axes.digits.push_back(all[i]);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<int> expected;
      for (int other = 0; other < kRanks; ++other) {
        bool differs = false;
        for (size_t i = 0; i < all.size(); ++i) {
          differs |= ((chosen >> i) & 1U) == 0 && all[i].index_of(other) != all[i].index_of(rank);
        }
        if (other == rank) {
          EXPECT_EQ(axes.index_of(rank), static_cast<int>(expected.size()));
        }
        if (!differs) expected.push_back(other);
      }
      EXPECT_EQ(axes.members(rank), expected);
      EXPECT_EQ(axes.size(), static_cast<int>(expected.size()));
    }
  }
}

}  // namespace
}  // namespace smp::core
