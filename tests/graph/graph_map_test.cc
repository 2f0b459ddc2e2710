// SPDX-License-Identifier: Apache-2.0
// Maps between graphs, by brute force: a composed map does the same as its parts one after the
// other.
#include "graph/graph_map.h"

#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/error_of.h"
#include "tests/graph/harness.h"

namespace smp::graph::testing {
namespace {

using smp::testing::error_of;
using smp::testing::error_or_none;

constexpr int kMapArguments = 3;

/// Maps without graphs: each operator and value goes to none, one or several, and some numbers to
/// other arguments, changed, or nowhere.
class RandomMaps {
 public:
  explicit RandomMaps(unsigned seed) : random_(seed) {}

  int number(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }

  GraphMap map(int from, int to) {
    GraphMap map;
    for (int i = 0; i < from; ++i) {
      map.operators.push_back(some(to));
      map.values.push_back(some(to));
      for (int argument = 0; argument < kMapArguments; ++argument) {
        if (number(2) == 0) add_number(map, i, argument, to);
      }
    }
    return map;
  }

  std::vector<ConstantOverride> changes(int operators) {
    std::vector<ConstantOverride> result;
    for (int i = 0; i < 4; ++i)
      result.push_back({number(operators), number(kMapArguments), i + 0.5});
    return result;
  }

 private:
  std::vector<int> some(int to) {
    std::vector<int> result;
    for (int left = number(3); left > 0; --left) result.push_back(number(to));
    return result;
  }

  void add_number(GraphMap& map, int op, int argument, int to) {
    auto& places = map.numbers[{op, argument}];
    for (int left = number(3); left > 0; --left) {
      if (number(12) == 0) {
        places.push_back({-1, 0, nullptr, "operator " + std::to_string(op)});
        continue;
      }
      places.push_back({number(to), number(kMapArguments), nullptr, ""});
      if (number(2) == 0) continue;
      const double factor = number(5), term = number(5);
      places.back().change = [factor, term](const c10::IValue& value) {
        return c10::IValue(value.toDouble() * factor + term);
      };
    }
  }

  std::mt19937 random_;
};

/// The overrides as text, or the error.
std::string overrides_text(const std::function<std::vector<ConstantOverride>()>& overrides) {
  std::string text;
  const std::string error = error_or_none([&] {
    for (const auto& change : overrides()) {
      text += c10::str(change.operator_index, ".", change.argument, "=", change.value, " ");
    }
  });
  return error.empty() ? text : "error";
}

TEST(GraphMap, ComposedMapsDoWhatTheirPartsDo) {
  int errors = 0, changed = 0;
  for (unsigned seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    RandomMaps random(seed);
    const GraphMap first = random.map(5, 6), second = random.map(6, 4), third = random.map(4, 7);
    const GraphMap both = compose(first, second);
    const auto changes = random.changes(5);
    const std::string expected =
        overrides_text([&] { return second.constants(first.constants(changes)); });
    EXPECT_EQ(overrides_text([&] { return both.constants(changes); }), expected);
    EXPECT_EQ(
        overrides_text([&] { return compose(both, third).constants(changes); }),
        overrides_text([&] { return compose(first, compose(second, third)).constants(changes); }));
    errors += expected == "error";
    changed += expected.size() > 10;
    for (ValueId v = 0; v < 5; ++v) {
      const ContentOverride change{v, torch::tensor(static_cast<double>(v))};
      const auto got = both.contents({change});
      const auto wanted = second.contents(first.contents({change}));
      ASSERT_EQ(got.size(), wanted.size());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(got[i].value, wanted[i].value);
        EXPECT_TRUE(got[i].content.is_same(change.content));
      }
    }
  }
  EXPECT_GT(errors, 50);
  EXPECT_GT(changed, 300);
}

TEST(GraphMap, ANumberThatMustStayIsNamedAfterTheFirstGraphsOperator) {
  GraphMap first, second;
  first.operators = {{1}};
  second.operators = {{}, {0}};
  second.numbers[{1, 2}] = {{-1, 0, nullptr, "aten::dropout"}};
  EXPECT_EQ(error_of<UsageError>([&] {
              compose(first, second).constants({{0, 2, 0.25}});
            }),
            "[smp] a number in operator aten::dropout is now 0.25, but it decided how tensor "
            "parallelism divided the operator. Keep it as it was in the first step, or give steps "
            "of another kind a step function of their own");
}

/// Outputs of three microbatches as one, of which four run: by position and microbatch.
TEST(GraphMap, OutputsAreThoseOfTheMicrobatchesInOrder) {
  constexpr int kFactor = 3, kRun = 4, kPositions = 2;
  GraphMap map;
  map.factor = kFactor;
  std::vector<Tensors> made(kPositions * kFactor, Tensors(kRun)), expected(kPositions);
  for (int position = 0; position < kPositions; ++position) {
    for (int microbatch = 0; microbatch < kFactor * kRun; ++microbatch) {
      expected[position].push_back(torch::tensor(100 * position + microbatch));
      made[position * kFactor + microbatch % kFactor][microbatch / kFactor] =
          expected[position].back();
    }
  }
  const auto got = map.outputs(made);
  ASSERT_EQ(got.size(), expected.size());
  for (int position = 0; position < kPositions; ++position) {
    ASSERT_EQ(got[position].size(), expected[position].size());
    for (size_t m = 0; m < got[position].size(); ++m) {
      EXPECT_TRUE(got[position][m].is_same(expected[position][m])) << position << " " << m;
    }
  }
  const GraphMap coalesced = map;
  EXPECT_NE(error_of([&] {
              compose(map, coalesced);
            }).find("microbatches that run as one were coalesced again"),
            std::string::npos);
}

TEST(GraphMap, OrdersMoveNumbersWithTheirOperators) {
  double factor = 2;
  const Function step = [&](const Tensors& in) -> Tensors {
    return {in[0].mul(factor).exp(), in[0].mul(factor + 1).sin()};
  };
  const Tensors inputs = {torch::randn({3})};
  const auto recorded = trace({}, inputs, step, false).recorded;
  ASSERT_EQ(recorded->operators.size(), 4u);
  const std::vector<int> order = {2, 0, 3, 1};
  Graph ordered = *recorded;
  for (size_t i = 0; i < order.size(); ++i) ordered.operators[i] = recorded->operators[order[i]];
  const GraphMap map = compose(GraphMap::in_order(*recorded), GraphMap::in_order(*recorded, order));
  factor = 3;
  const auto guarded = trace({}, inputs, step, false, {recorded.get()});
  ASSERT_EQ(guarded.match, recorded.get());
  const Replayed got = replay(ordered, {}, inputs, {}, map.constants(guarded.constants));
  const Tensors expected = step(inputs);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(got.outputs[i], expected[i])) << i;
  }
}

}  // namespace
}  // namespace smp::graph::testing
