// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <numeric>

#include "comm/world.h"
#include "tests/comm/harness.h"

namespace smp::comm {

std::vector<int> group_sizes() { return {make_world()->size()}; }

void on_every_rank(int size, const std::function<void(const CommunicatorPtr&)>& body) {
  const CommunicatorPtr world = make_world();
  ASSERT_EQ(size, world->size());
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  const CommunicatorPtr group = world->split(all, "world");
  group->set_timeout(std::chrono::seconds(30));
  body(group);
}

}  // namespace smp::comm
