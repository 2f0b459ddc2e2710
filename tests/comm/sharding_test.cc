// SPDX-License-Identifier: Apache-2.0
#include "comm/sharding.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads/run_ranks.h"
#include "smp/error.h"
#include "tests/error_of.h"

// Held against a brute force that asks of each element of the whole where it lies.
namespace smp::comm {
namespace {

using core::Axis;
using ::testing::HasSubstr;
using Sizes = std::vector<int64_t>;

/// The ranks of a mesh of 4 x 3 x 2, of which two halve the first.
const Axis kOuter{6, 4}, kMiddle{2, 3}, kInner{1, 2};
const Axis kNear = kOuter.split(2).first, kFar = kOuter.split(2).second;
constexpr int kRanks = 24;

/// The axes of the cuts, outermost first, those that are no owner's and no range in blocks.
struct Case {
  std::vector<Axis> axes;
  bool ends_in_range;
  bool has_owner = false;  // over the first axis
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{{{kInner}, false},
                                     {{kMiddle}, true},
                                     {{kMiddle, kInner}, false},
                                     {{kInner, kOuter}, true},
                                     {{kOuter, kMiddle}, true},
                                     {{kOuter, kMiddle, kInner}, true},
                                     {{kInner, kNear}, true},
                                     {{kFar, kMiddle, kNear}, true},
                                     {{kMiddle}, false, true},
                                     {{kOuter, kInner}, true, true},
                                     {{kMiddle, kInner, kNear}, true, true},
                                     {{kOuter, kInner, kMiddle}, false, true}};
  return all;
}

/// A sharding of any sizes with such cuts, those in blocks along different dimensions.
Sharding draw(std::mt19937& engine, const Case& of) {
  const auto& [axes, ends_in_range, has_owner] = of;
  const auto number = [&](int64_t first, int64_t last) {
    return first + static_cast<int64_t>(engine() % static_cast<unsigned>(last - first + 1));
  };
  Sharding result;
  for (int64_t dim = 0; dim < 4; ++dim) {
    result.order.push_back(dim);
    result.sizes.push_back(number(1, 3));
  }
  std::shuffle(result.order.begin(), result.order.end(), engine);
  Sizes dims = result.order;
  std::shuffle(dims.begin(), dims.end(), engine);
  if (has_owner) {
    const auto position = static_cast<int>(number(0, axes[0].size - 1));
    result.cuts.push_back({axes[0], Owner{position}});
  }
  for (size_t i = has_owner ? 1 : 0; i + (ends_in_range ? 1 : 0) < axes.size(); ++i) {
    const Sizes extents{axes[i].size * number(1, 3), axes[i].size * number(1, 3)};
    result.sizes[dims[i]] = extents[0] + extents[1];
    result.cuts.push_back({axes[i], Blocks{dims[i], extents}});
  }
  if (!ends_in_range) return result;
  const int64_t numel = c10::multiply_integers(result.sizes_of(0));
  const int64_t offset = number(0, 7), ranks = axes.back().size;
  const int64_t length = (numel + offset + ranks - 1) / ranks + number(0, 4);
  result.cuts.push_back({axes.back(), Range{offset, length}});
  return result;
}

/// Finds an element of the whole: by cut the index of the ranks that have it, and its place there.
std::pair<std::vector<int>, Sizes> locate(const Sharding& sharding, Sizes place) {
  std::vector<int> indices;
  Sizes sizes = sharding.sizes;
  for (const auto& [over, how] : sharding.cuts) {
    if (const auto* blocks = std::get_if<Blocks>(&how)) {
      int64_t& position = place[blocks->dim];
      int64_t in_whole = 0, in_part = 0;
      for (const int64_t extent : blocks->extents) {
        const int64_t share = extent / over.size;
        if (position < in_whole + extent) {
          indices.push_back(static_cast<int>((position - in_whole) / share));
          position = in_part + (position - in_whole) % share;
          break;
        }
        in_whole += extent;
        in_part += share;
      }
      sizes[blocks->dim] /= over.size;
      continue;
    }
    if (const auto* owner = std::get_if<Owner>(&how)) {
      indices.push_back(owner->position);
      continue;
    }
    const Range& range = std::get<Range>(how);
    int64_t element = 0;
    for (const int64_t dim : sharding.order) element = element * sizes[dim] + place[dim];
    const int64_t index = (element + range.offset) / range.length;
    indices.push_back(static_cast<int>(index));
    place = {element - std::max<int64_t>(0, index * range.length - range.offset)};
  }
  return {indices, place};
}

TEST(Sharding, GivesEachRankTheElementsOfABruteForce) {
  std::mt19937 engine(7);
  for (int repetition = 0; repetition < 20; ++repetition) {
    for (const Case& of : cases()) {
      const Sharding sharding = draw(engine, of);
      const auto whole = at::arange(c10::multiply_integers(sharding.sizes)).view(sharding.sizes);
      const auto turned = whole.transpose(0, 3).contiguous().transpose(0, 3);
      std::vector<at::Tensor> parts;
      int64_t held = 0;
      for (int rank = 0; rank < kRanks; ++rank) {
        parts.push_back(sharding.cut(whole, rank));
        ASSERT_EQ(parts.back().sizes(), at::IntArrayRef(sharding.sizes_of(rank)));
        EXPECT_TRUE(at::equal(sharding.cut(turned, rank), parts.back())) << "another layout";
        if (sharding.is_on(rank)) held += parts.back().numel();
      }
      int copies = kRanks;
      for (const Axis& axis : of.axes) copies /= axis.size;
      EXPECT_EQ(held, copies * whole.numel());
      for (int64_t element = 0; element < whole.numel(); ++element) {
        Sizes place(sharding.sizes.size());
        int64_t left = element;
        for (size_t dim = place.size(); dim-- > 0; left /= sharding.sizes[dim]) {
          place[dim] = left % sharding.sizes[dim];
        }
        const auto [indices, there] = locate(sharding, place);
        int rank = 0;
        for (size_t i = 0; i < of.axes.size(); ++i) rank = of.axes[i].member(rank, indices[i]);
        EXPECT_TRUE(sharding.is_on(rank));
        int64_t number = 0;
        for (size_t dim = 0; dim < there.size(); ++dim) {
          number = number * parts[rank].size(static_cast<int64_t>(dim)) + there[dim];
        }
        ASSERT_EQ(parts[rank].contiguous().data_ptr<int64_t>()[number], element);
      }
    }
  }
}

TEST(Sharding, JoinUndoesTheCutsFromTheLast) {
  std::mt19937 engine(8);
  for (int repetition = 0; repetition < 20; ++repetition) {
    for (const Case& of : cases()) {
      Sharding sharding = draw(engine, of);
      const auto whole = at::rand(sharding.sizes, at::kDouble);
      std::vector<at::Tensor> held;
      for (int rank = 0; rank < kRanks; ++rank) {
        held.push_back(sharding.cut(whole, rank));
        if (!sharding.is_on(rank)) held.back() = at::full_like(held.back(), -1);
      }
      for (; !sharding.cuts.empty(); sharding.cuts.pop_back()) {
        const Axis over = sharding.cuts.back().over;
        std::vector<at::Tensor> joined;
        for (int rank = 0; rank < kRanks; ++rank) {
          std::vector<at::Tensor> parts;
          for (int i = 0; i < over.size; ++i) parts.push_back(held[over.member(rank, i)]);
          joined.push_back(sharding.join(parts));
        }
        held = std::move(joined);
      }
      for (const auto& tensor : held) EXPECT_TRUE(at::equal(tensor, whole));
    }
  }
}

TEST(Sharding, CutsGoOnWhereOthersEnded) {
  std::mt19937 engine(9);
  const Sharding sharding = draw(engine, {{kMiddle, kInner}, true});
  Sharding first = sharding;
  first.cuts.pop_back();
  const auto whole = at::rand(sharding.sizes);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(
        at::equal(sharding.cut(first.cut(whole, rank), rank, 1), sharding.cut(whole, rank)));
    EXPECT_EQ(sharding.sizes_of(rank, 1), first.sizes_of(rank));
    EXPECT_EQ(sharding.sizes_of(rank, 0), sharding.sizes);
    EXPECT_TRUE(at::equal(sharding.along(kInner)->cut(first.cut(whole, rank), rank),
                          sharding.cut(whole, rank)));
    EXPECT_TRUE(at::equal(sharding.along(kMiddle)->cut(whole, rank), first.cut(whole, rank)));
  }
  EXPECT_FALSE(sharding.along(kOuter));
  EXPECT_FALSE(sharding.along({kInner.stride, kInner.size + 1}));
}

/// Axes of one rank are equal where their digits follow each other.
TEST(Sharding, OwnersDoNotDivide) {
  const Axis one{2, 1};
  const Cut owner{one, Owner{0}}, range{one, Range{0, 12}};
  EXPECT_EQ((Sharding{{4, 3}, {0, 1}, {owner, range}}.along(one)),
            (Sharding{{4, 3}, {0, 1}, {range}}));
  EXPECT_FALSE((Sharding{{4, 3}, {}, {owner}}.along(one)));
}

TEST(Sharding, RangesShareMemoryThatLiesInTheirOrder) {
  const auto whole = at::rand({4, 6}).t();
  const Sharding sharding{{6, 4}, memory_order(whole), {{{1, 2}, Range{3, 16}}}};
  EXPECT_EQ(sharding.order, (Sizes{1, 0}));
  const auto first = sharding.cut(whole, 0), second = sharding.cut(whole, 1);
  EXPECT_TRUE(first.is_alias_of(whole));
  EXPECT_TRUE(at::equal(at::cat({first, second}), whole.t().reshape({-1})));
  EXPECT_EQ(first.numel(), 13);
  EXPECT_EQ(memory_order(at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)),
            (Sizes{0, 2, 3, 1}));
  EXPECT_EQ(memory_order(at::rand({8, 8}).t().slice(0, 0, 4)), (Sizes{0, 1})) << "gaps";
}

TEST(Sharding, RangesThatFollowEachOtherAreViewed) {
  const Sharding sharding{{5, 4}, {1, 0}, {{{1, 3}, Range{0, 8}}}};
  const auto whole = at::rand({5, 4});
  const auto flat = at::cat({whole.t().reshape({-1}), at::zeros({4})});
  const auto padded = flat.view({3, 8});
  const auto joined = sharding.join({padded[0], padded[1], padded[2].narrow(0, 0, 4)});
  EXPECT_TRUE(joined.is_alias_of(flat));
  EXPECT_TRUE(at::equal(joined, whole));

  const auto turned = flat.view({3, 8}).flip(0), apart = at::stack({flat, flat}, 1).select(1, 0);
  for (const auto& parts :
       {std::vector{turned[2], turned[1], turned[0].narrow(0, 0, 4)},
        std::vector{apart.narrow(0, 0, 8), apart.narrow(0, 8, 8), apart.narrow(0, 16, 4)}}) {
    EXPECT_FALSE(sharding.join(parts).is_alias_of(parts[0]));
    EXPECT_TRUE(at::equal(sharding.join(parts), whole));
  }
  const Sharding one{{20}, {0}, {{{1, 2}, Range{0, 32}}}};
  const auto strided = apart.narrow(0, 0, 20);
  EXPECT_TRUE(at::equal(one.join({strided, at::empty({0})}), strided));
}

TEST(Sharding, RefusesTensorsOfOtherSizes) {
  const Sharding rows{{4, 3}, {}, {{{1, 2}, Blocks{0, {4}}}}};
  EXPECT_THROW(rows.cut(at::rand({6, 3}), 0), Error);
  const Sharding range{{4, 3}, {0, 1}, {{{1, 2}, Range{0, 8}}}};
  EXPECT_THROW(range.cut(at::rand({5, 3}), 0), Error);
  run_ranks(2, [&](const CommunicatorPtr& group) {
    const std::vector<Part> parts{{rows, at::rand({1, 1})}};  // which could be broadcast
    EXPECT_THROW(join(*group, parts, at::kFloat, group->rank(), 0), Error);
  });
}

TEST(Sharding, RefusesCutsThatWouldLoseElements) {
  const auto error = [](const Sharding& sharding) {
    return smp::testing::error_of([&] { sharding.cut(at::rand(sharding.sizes), 0); });
  };
  EXPECT_THAT(
      error({{8, 3}, {}, {{{1, 2}, Blocks{0, {3, 5}}}}}),
      HasSubstr("blocks that do not divide evenly: [8, 3] along dimension 0 in blocks of [3, 5] "
                "over 2 ranks"));
  EXPECT_THAT(
      error({{8, 3}, {}, {{{1, 2}, Blocks{0, {4, 2}}}}}),
      HasSubstr("blocks that do not divide evenly: [8, 3] along dimension 0 in blocks of [4, 2]"));
  EXPECT_THAT(error({{8}, {0}, {{{1, 2}, Range{0, 4}}, {{2, 2}, Range{0, 2}}}}),
              HasSubstr("a cut follows a range: [8] 4 elements each over 2 ranks, then 2"));
  for (const int position : {-1, 2}) {
    EXPECT_THAT(error({{8}, {}, {{{1, 2}, Owner{position}}}}),
                HasSubstr(c10::str("no rank owns [8] at position ", position, " over 2 ranks")));
  }
}

TEST(Sharding, IsToldAndCompared) {
  const Axis axis{1, 2}, other{2, 4};
  const std::vector<std::pair<Sharding, std::string>> told{
      {{{4, 3}, {}, {}}, "[4, 3]"},
      {{{4, 3}, {}, {{axis, Blocks{0, {4}}}}}, "[4, 3] along dimension 0 over 2 ranks"},
      {{{12, 3}, {}, {{axis, Blocks{0, {4, 4, 4}}}}},
       "[12, 3] along dimension 0 in 3 blocks over 2 ranks"},
      {{{3, 12}, {0, 1}, {{axis, Blocks{1, {4, 8}}}, {other, Range{0, 8}}}},
       "[3, 12] along dimension 1 in blocks of [4, 8] over 2 ranks, then 8 elements each over 4 "
       "ranks"},
      {{{40}, {0}, {{other, Range{16, 16}}}},
       "[40] 16 elements each from 16 before the first over 4 ranks"},
      {{{40, 2}, {}, {{axis, Owner{1}}, {other, Blocks{0, {40}}}}},
       "[40, 2] at position 1 over 2 ranks, then along dimension 0 over 4 ranks"},
      {{{40, 2}, {}, {{axis, Owner{0}}, {other, Blocks{0, {40}}}}},
       "[40, 2] at position 0 over 2 ranks, then along dimension 0 over 4 ranks"},
      {{{40}, {0}, {{{1, 4}, Range{16, 16}}}},
       "[40] 16 elements each from 16 before the first over 4 ranks"}};
  for (size_t i = 0; i < told.size(); ++i) {
    EXPECT_EQ(told[i].first.to_string(), told[i].second);
    for (size_t k = 0; k < told.size(); ++k) {
      EXPECT_EQ(told[i].first == told[k].first, i == k) << told[i].second;
    }
  }
}

/// Lists of any dtype, of parts of other lengths on each rank, of which some have none.
TEST(Join, GivesListsToOneRankOrToAll) {
  const Axis axis{1, 3};
  const std::vector<std::vector<Sharding>> lists{
      {{{6, 4}, {1, 0}, {{axis, Range{5, 11}}}},
       {{7}, {0}, {{axis, Range{0, 16}}}},
       {{9, 2}, {}, {{axis, Blocks{0, {3, 6}}}}},
       {{}, {}, {{axis, Range{20, 16}}}}},
      {{{9, 2}, {}, {{axis, Blocks{0, {9}}}}}, {{5, 3}, {}, {{axis, Owner{1}}}}},
      {{{5, 3}, {}, {{axis, Owner{1}}}}, {{4}, {}, {{axis, Owner{0}}}}},
      {{{5, 3}, {}, {{axis, Owner{2}}}},
       {{}, {}, {{axis, Owner{2}}}},
       {{0}, {}, {{axis, Owner{2}}}}}};
  for (const auto dtype : {at::kFloat, at::kLong, at::kBool, at::kComplexDouble, at::kBFloat16}) {
    run_ranks(3, [&](const CommunicatorPtr& group) {
      for (const auto& shardings : lists) {
        const bool owned = &shardings == &lists.back();
        std::vector<at::Tensor> wholes;
        std::vector<Part> parts;
        for (const Sharding& sharding : shardings) {
          const auto numel = c10::multiply_integers(sharding.sizes);
          wholes.push_back((at::arange(numel) % 2).view(sharding.sizes).to(dtype));
          auto own = sharding.cut(wholes.back(), group->rank());
          if (!sharding.is_on(group->rank())) own = at::ones({7}, dtype);  // is not read
          parts.push_back({sharding, own.numel() > 0 ? own : at::Tensor()});
        }
        for (int root = 0; root < 4; ++root) {
          const auto to = root < 3 ? std::optional(root) : std::nullopt;
          const auto joined = join(*group, parts, wholes[0].options(), group->rank(), to);
          ASSERT_EQ(joined.size(), wholes.size());
          for (size_t i = 0; i < wholes.size(); ++i) {
            ASSERT_EQ(joined[i].defined(), root == 3 || group->rank() == root);
            if (!joined[i].defined()) continue;
            EXPECT_TRUE(at::equal(joined[i], wholes[i])) << dtype << i;
            // No memory beside it where one has all: a save gives large tensors one by one.
            if (!parts[i].own.defined()) continue;
            EXPECT_EQ(joined[i].is_alias_of(parts[i].own), owned && group->rank() == 2) << i;
          }
        }
      }
    });
  }
}

}  // namespace
}  // namespace smp::comm
