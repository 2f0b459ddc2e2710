// SPDX-License-Identifier: Apache-2.0
// Runs alone, under mpirun and with torchrun's variables: the launcher defines the world.

#include "comm/world.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "smp/error.h"

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

using Pairs = std::vector<std::pair<const char*, const char*>>;

class Variables {
 public:
  explicit Variables(Pairs all) : all_(std::move(all)) {
    for (const auto& [name, value] : all_) setenv(name, value, 1);
  }
  ~Variables() {
    for (const auto& [name, value] : all_) unsetenv(name);
  }

 private:
  Pairs all_;
};

// The variables that SLURM sets for a task of `srun`, and for a batch script, which is no task of
// several.
TEST(World, KnowsTasksOfSlurm) {
  if (launcher() != Launcher::kNone) return;  // these come first
  const Variables job({{"SLURM_JOB_ID", "7"},
                       {"SLURM_NTASKS", "4"},
                       {"SLURM_PROCID", "0"},
                       {"SLURM_LOCALID", "0"},
                       {"SLURM_NODEID", "0"}});
  EXPECT_EQ(launcher(), Launcher::kNone);
  EXPECT_EQ(make_world()->size(), 1);
  {
    const Variables task(Pairs{{"SLURM_STEP_NUM_TASKS", "1"}});
    EXPECT_EQ(make_world()->size(), 1);
  }
  const Variables tasks({{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "2"}});
  try {
    make_world();
    ADD_FAILURE() << "each task would train alone";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("srun started 4 tasks (SLURM_STEP_NUM_TASKS), of which this is one, and "
                        "gave them neither PMIX_RANK nor PMI_RANK"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("Start them with srun --mpi=pmix"), std::string::npos) << text;
  }
  const Variables pmix(Pairs{{"PMIX_RANK", "2"}});
  EXPECT_EQ(launcher(), Launcher::kSrun);
}

// Each would train alone, without a word.
TEST(World, RefusesHalfOfTorchrunsVariables) {
  if (launcher() != Launcher::kNone) return;
  {
    const Variables alone(Pairs{{"WORLD_SIZE", "1"}});
    EXPECT_EQ(make_world()->size(), 1);
  }
  for (const auto& [set, value, unset] :
       {std::tuple{"RANK", "1", "WORLD_SIZE"}, std::tuple{"WORLD_SIZE", "2", "RANK"}}) {
    const Variables half(Pairs{{set, value}});
    try {
      make_world();
      ADD_FAILURE() << set;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what())
                    .find(std::string("the environment variable ") + set + " is " + value +
                          ", and " + unset +
                          " is not set. Set RANK, WORLD_SIZE, MASTER_ADDR and "
                          "MASTER_PORT for each process of a job"),
                std::string::npos)
          << error.what();
    }
  }
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
