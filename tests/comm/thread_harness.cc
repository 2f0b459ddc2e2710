// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/run_ranks.h"
#include "tests/comm/harness.h"

namespace smp::comm {

std::vector<int> group_sizes() { return {1, 2, 3, 4}; }

void on_every_rank(int size, const std::function<void(const CommunicatorPtr&)>& body) {
  run_ranks(size, [&body](const CommunicatorPtr& world) {
    world->set_timeout(std::chrono::seconds(30));
    body(world);
  });
}

}  // namespace smp::comm
