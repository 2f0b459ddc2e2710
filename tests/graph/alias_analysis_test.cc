// SPDX-License-Identifier: Apache-2.0
#include "graph/alias_analysis.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <vector>

namespace smp::graph {
namespace {

Value on(int alias_set, ValueKind kind = ValueKind::kResult) {
  Value value;
  value.kind = kind;
  value.alias_set = alias_set;
  return value;
}

Operator writing(std::vector<int> sets) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow("aten::add_", "Tensor");
  Operator op{handle};
  op.writes.assign(sets.begin(), sets.end());
  return op;
}

/// A parameter with a view, a result with one, and a value without memory.
TEST(AliasAnalysis, TellsWhoseMemoryAndWhoWritesIt) {
  Graph graph;
  graph.values = {on(0, ValueKind::kParameter), on(1), on(0), on(1), on(-1)};
  graph.operators = {writing({}), writing({1, 1}), writing({}), writing({1, 0})};
  graph.alias_sets = 2;
  const AliasAnalysis aliases(graph);

  EXPECT_EQ(aliases.set(0).values, (std::vector<ValueId>{0, 2}));
  EXPECT_EQ(aliases.set(0).writers, (std::vector<int>{3}));
  EXPECT_EQ(aliases.set(0).base, 0);
  EXPECT_TRUE(aliases.of(2).outlives_run());

  const auto& made = aliases.of(3);
  EXPECT_EQ(made.values, (std::vector<ValueId>{1, 3}));
  EXPECT_EQ(made.writers, (std::vector<int>{1, 3}));
  EXPECT_FALSE(made.outlives_run());
  EXPECT_EQ(made.last_writer(), 3);
  EXPECT_TRUE(made.is_written_from(3));
  EXPECT_FALSE(made.is_written_from(4));

  EXPECT_TRUE(aliases.of(4).values.empty());
  EXPECT_FALSE(aliases.of(4).is_written());
  EXPECT_FALSE(aliases.of(4).is_written_from(0));
  EXPECT_EQ(aliases.of(4).last_writer(), -1);
}

}  // namespace
}  // namespace smp::graph
