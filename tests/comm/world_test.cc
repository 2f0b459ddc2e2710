// Runs alone and under mpirun: the world is what the launcher says.

#include "comm/world.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "comm/mpi/mpi_communicator.h"

namespace smp::comm {
namespace {

int expected_size() {
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  return size ? std::atoi(size) : 1;
}

TEST(World, HasTheRanksOfTheLauncher) {
  const CommunicatorPtr world = make_world();
  EXPECT_EQ(world->size(), expected_size());
  EXPECT_EQ(world->name(), "world");
  EXPECT_EQ(make_world(), world);
  EXPECT_EQ(under_mpirun(), expected_size() > 1);
  EXPECT_EQ(all_gather_bytes(*world, std::to_string(world->rank())).back(),
            std::to_string(expected_size() - 1));
  EXPECT_FALSE(world_aborted());
}

// All ranks of a test are on one host.
TEST(World, KnowsItsHosts) {
  const CommunicatorPtr world = make_world();
  const WorldHosts hosts = world_hosts();
  EXPECT_EQ(hosts.local_rank, world->rank());
  EXPECT_EQ(hosts.local_size, expected_size());
  ASSERT_EQ(hosts.names.size(), static_cast<size_t>(expected_size()));
  EXPECT_FALSE(hosts.names.front().empty());
  EXPECT_EQ(hosts.names.front(), hosts.names.back());
}

}  // namespace
}  // namespace smp::comm
