// SPDX-License-Identifier: Apache-2.0
// The errors when MPI cannot be started as it is needed. MPI can be started once in a process, so
// the cases follow each other in one test, on one rank.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>

#include "comm/mpi/mpi_communicator.h"
#include "core/check.h"
#include "tests/comm/test_tensors.h"

namespace {

// The fault of the MPI below; it answers otherwise as Open MPI does.
bool has_threads = true;
bool splits = true;
bool others_come = true;
int greatest_tag = 1 << 30;

}  // namespace

// MPI's profiling interface: these stand before the functions of the library, which have a second
// name.
extern "C" {

int MPI_Query_thread(int* provided) {
  const int result = PMPI_Query_thread(provided);
  if (!has_threads) *provided = MPI_THREAD_SERIALIZED;
  return result;
}

int MPI_Comm_get_attr(MPI_Comm comm, int key, void* value, int* found) {
  if (key != MPI_TAG_UB) return PMPI_Comm_get_attr(comm, key, value, found);
  *static_cast<int**>(value) = &greatest_tag;
  *found = 1;
  return MPI_SUCCESS;
}

int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* result) {
  while (!others_come) pause();
  return splits ? PMPI_Comm_split_type(comm, type, key, info, result) : MPI_ERR_INTERN;
}

}  // extern "C"

namespace smp::comm {
namespace {

using ::testing::HasSubstr;

void nothing_is_known_before() {
  EXPECT_THAT(error_of<UsageError>([] { mpi_hosts(); }),
              HasSubstr("mpi_hosts needs a started MPI. Call make_mpi_world() first."));
}

void needs_threads() {
  int provided = 0;
  ASSERT_EQ(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), MPI_SUCCESS);
  ASSERT_EQ(provided, MPI_THREAD_MULTIPLE);
  has_threads = false;
  EXPECT_THAT(error_of<CommError>([] { make_mpi_world(); }),
              HasSubstr("MPI offers thread level 2, expected MPI_THREAD_MULTIPLE (3). Use an MPI "
                        "built with thread support"));
  has_threads = true;
}

void needs_tags() {
  greatest_tag = 32767;  // the least that MPI's standard allows
  EXPECT_THAT(
      error_of<CommError>([] { make_mpi_world(); }),
      HasSubstr("MPI allows tags up to 32767, expected " + std::to_string(2 * (kMaxTag + 1) - 1) +
                ". Choose another transport, for example mpirun --mca pml ob1."));
  greatest_tag = 1 << 30;
}

void calls_that_fail_are_named() {
  splits = false;
  EXPECT_THAT(error_of<CommError>([] { make_mpi_world(); }),
              HasSubstr("MPI_Comm_split_type failed: MPI_ERR_INTERN: internal error. Run the job "
                        "again; if it fails again, run a plain MPI program"));
  splits = true;
}

void ends_the_process_when_others_do_not_come() {
  others_come = false;
  EXPECT_EXIT(make_mpi_world(std::chrono::milliseconds(200)), ::testing::ExitedWithCode(1),
              "rank 0. MPI has not started within 0.2 s: a rank of the job has not come to "
              "smp::init, or is stopped");
  others_come = true;
}

void only_once() {
  EXPECT_EQ(make_mpi_world()->size(), 1);
  finalize_mpi();
  EXPECT_THAT(error_of<UsageError>([] { make_mpi_world(); }),
              HasSubstr("make_mpi_world after finalize_mpi: MPI can be started only once in a "
                        "process."));
  EXPECT_EQ(MPI_Finalize(), MPI_SUCCESS);  // started here, so not ended by finalize_mpi
}

TEST(MpiStart, SaysWhatIsMissing) {
  nothing_is_known_before();
  needs_threads();
  needs_tags();
  calls_that_fail_are_named();
  ends_the_process_when_others_do_not_come();
  only_once();
}

}  // namespace
}  // namespace smp::comm
