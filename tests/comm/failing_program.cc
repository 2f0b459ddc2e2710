// Tests that fail on purpose on one rank; run and checked by mpi_failure_test.sh.

#include <gtest/gtest.h>

#include <stdexcept>

#include "comm/mpi/mpi_communicator.h"

namespace smp::comm {
namespace {

TEST(Failing, LeavesEarly) {
  const CommunicatorPtr world = make_mpi_world();
  ASSERT_NE(world->rank(), 1) << "on purpose";
  world->barrier();
}

TEST(Failing, Throws) {
  const CommunicatorPtr world = make_mpi_world();
  if (world->rank() == 1) {
    throw std::runtime_error("thrown on purpose");
  }
  world->barrier();
}

TEST(Failing, GoesOn) {
  const CommunicatorPtr world = make_mpi_world();
  EXPECT_NE(world->rank(), 1) << "on purpose";
  world->barrier();
}

}  // namespace
}  // namespace smp::comm
