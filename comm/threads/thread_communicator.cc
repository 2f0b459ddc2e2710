#include "comm/threads/thread_communicator.h"

#include <memory>
#include <numeric>

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
  std::vector<int> world_ranks(size);
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  std::vector<CommunicatorPtr> ranks;
  for (int rank = 0; rank < size; ++rank) {
    auto group = std::make_shared<GroupState>();
    group->name = "world";
    group->rank = rank;
    group->size = size;
    group->world_rank = rank;
    group->world_ranks = world_ranks;
    group->context = 0;
    ranks.push_back(std::make_shared<TransportCommunicator>(world, std::move(group)));
  }
  return ranks;
}

}  // namespace smp::comm
