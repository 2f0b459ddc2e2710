// SPDX-License-Identifier: Apache-2.0
#include "graph/weak_map.h"

#include <c10/util/intrusive_ptr.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace smp::graph {
namespace {

struct Object : c10::intrusive_ptr_target {};
using Owner = c10::intrusive_ptr<Object>;
using Map = WeakMap<Object, int>;

int& add(Map& map, const Owner& owner) {
  return map.add(owner.get(), [&] { return c10::weak_intrusive_ptr<Object>(owner); });
}

TEST(WeakMap, KnowsWhatIsAliveWhateverComesAndGoes) {
  Map map;
  std::vector<Owner> kept;
  for (int i = 0; i < 5000; ++i) {
    auto owner = c10::make_intrusive<Object>();
    EXPECT_EQ(map.find(owner.get()), nullptr) << "another one's address";
    add(map, owner) = i;
    if (i % 7 == 0) kept.push_back(std::move(owner));
  }
  for (size_t k = 0; k < kept.size(); ++k) {
    ASSERT_NE(map.find(kept[k].get()), nullptr);
    EXPECT_EQ(*map.find(kept[k].get()), static_cast<int>(7 * k));
    EXPECT_EQ(add(map, kept[k]), static_cast<int>(7 * k)) << "known already";
  }
  std::set<int> alive;
  map.for_each_alive([&](const Owner& owner, int info) {
    EXPECT_EQ(*map.find(owner.get()), info);
    alive.insert(info);
    return true;
  });
  EXPECT_EQ(alive.size(), kept.size());
  int visited = 0;
  map.for_each_alive([&](const Owner&, int) { return ++visited < 3; });
  EXPECT_EQ(visited, 3);
}

/// The weak references that the map still holds keep the memory of objects.
TEST(WeakMap, LetsMemoryGo) {
  Map map;
  std::vector<c10::weak_intrusive_ptr<Object>> all;
  const auto kept_by_map = [&] {
    int count = 0;
    for (const auto& weak : all) count += weak.weak_use_count() > 1;
    return count;
  };
  for (int i = 0; i < 3000; ++i) {
    const auto owner = c10::make_intrusive<Object>();
    all.emplace_back(owner);
    add(map, owner);
  }
  EXPECT_LE(kept_by_map(), 32) << "what is gone soon";
  std::vector<Owner> long_lived;
  for (int i = 0; i < 3000; ++i) {
    long_lived.push_back(c10::make_intrusive<Object>());
    all.emplace_back(long_lived.back());
    add(map, long_lived.back());
  }
  long_lived.clear();
  EXPECT_GT(kept_by_map(), 2900);
  for (int i = 0; i < 10000; ++i) {
    long_lived.push_back(c10::make_intrusive<Object>());
    add(map, long_lived.back());
  }
  EXPECT_LE(kept_by_map(), 32) << "what is gone later";
}

}  // namespace
}  // namespace smp::graph
