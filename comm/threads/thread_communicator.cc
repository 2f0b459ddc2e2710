// SPDX-License-Identifier: Apache-2.0
#include "comm/threads/thread_communicator.h"

#include <memory>

#include "comm/threads/thread_world.h"
#include "comm/transport_communicator.h"
#include "core/check.h"

namespace smp::comm {

std::vector<CommunicatorPtr> make_thread_world(int size) {
  return make_thread_world(size, std::make_shared<ThreadWorld>(size));
}

std::vector<CommunicatorPtr> make_thread_world(int size,
                                               const std::shared_ptr<ThreadWorld>& world) {
  SMP_CHECK_WITH(UsageError, size > 0, "make_thread_world: expected at least 1 rank, got ", size,
                 ".");
  std::vector<CommunicatorPtr> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_shared<TransportCommunicator>(world, world_group(rank, size)));
  }
  return ranks;
}

}  // namespace smp::comm
