// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "comm/mpi/caller_ranks.h"
#include "comm/mpi/mpi_communicator.h"
#include "smp/error.h"

namespace smp::comm {
namespace {

using testing::HasSubstr;

TEST(WithoutMpi, ARankOfMpirunIsKnownAndRefused) {
  unsetenv("OMPI_COMM_WORLD_SIZE");
  EXPECT_FALSE(under_mpirun());
  setenv("OMPI_COMM_WORLD_SIZE", "2", /*overwrite=*/1);
  EXPECT_TRUE(under_mpirun());
  try {
    make_mpi_world();
    FAIL() << "a world was made";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("this process was started by mpirun or srun, and smp was "
                                        "built without MPI. Build it with -DSMP_MPI=ON"));
  }
}

TEST(WithoutMpi, NoSessionHasTheRanksOfACommunicator) {
  try {
    exchange_texts(0, [](int) { return std::string(); });
    FAIL() << "there were ranks";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("a session cannot have the ranks of an MPI communicator, "
                                        "since smp was built without MPI"));
  }
}

TEST(WithoutMpi, ThereIsNothingToEnd) {
  EXPECT_NO_THROW(finalize_mpi());
  EXPECT_FALSE(mpi_aborted());
}

}  // namespace
}  // namespace smp::comm
