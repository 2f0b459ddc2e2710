// SPDX-License-Identifier: Apache-2.0
// Runs alone, under mpirun and with torchrun's variables: the world is what the launcher says.

#include "comm/world.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace smp::comm {
namespace {

int expected_size() {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"}) {
    if (const char* size = std::getenv(variable)) return std::atoi(size);
  }
  return 1;
}

TEST(World, HasTheRanksOfTheLauncher) {
  const CommunicatorPtr world = make_world();
  EXPECT_EQ(world->size(), expected_size());
  EXPECT_EQ(world->name(), "world");
  EXPECT_EQ(make_world(), world);
  EXPECT_EQ(all_gather_bytes(*world, std::to_string(world->rank())).back(),
            std::to_string(expected_size() - 1));
  EXPECT_FALSE(world_aborted());
}

TEST(World, KnowsItsLauncher) {
  if (std::getenv("OMPI_COMM_WORLD_SIZE")) {
    EXPECT_EQ(launcher(), Launcher::kMpirun);
    return;
  }
  EXPECT_EQ(launcher(), std::getenv("RANK") ? Launcher::kTorchrun : Launcher::kNone);
  setenv("PMIX_RANK", "0", 1);  // srun may have started torchrun
  EXPECT_EQ(launcher(), std::getenv("RANK") ? Launcher::kTorchrun : Launcher::kSrun);
  unsetenv("PMIX_RANK");
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
