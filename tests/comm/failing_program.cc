// SPDX-License-Identifier: Apache-2.0
// Tests that fail on purpose on one rank; run and checked by process_failure_test.sh.

#include <gtest/gtest.h>

#include <stdexcept>

#include "comm/world.h"
#include "tests/comm/marks.h"

namespace smp::comm {
namespace {

// The report of rank 0 is checked, so it must be in the test when rank 1 fails. No communication
// can tell rank 1 that: an abort may overtake a message that rank 0 has not looked at yet.
void wait_until_the_others_are_in_the_test(const CommunicatorPtr& world) {
  world->barrier();
  if (world->rank() == 1) {
    testing::wait_for_marks({0, 2});
  } else {
    testing::leave_mark(world->rank());
  }
}

TEST(Failing, LeavesEarly) {
  const CommunicatorPtr world = make_world();
  wait_until_the_others_are_in_the_test(world);
  ASSERT_NE(world->rank(), 1) << "on purpose";
  world->barrier();
}

TEST(Failing, Throws) {
  const CommunicatorPtr world = make_world();
  wait_until_the_others_are_in_the_test(world);
  if (world->rank() == 1) {
    throw std::runtime_error("thrown on purpose");
  }
  world->barrier();
}

TEST(Failing, GoesOn) {
  const CommunicatorPtr world = make_world();
  EXPECT_NE(world->rank(), 1) << "on purpose";
  world->barrier();
}

}  // namespace
}  // namespace smp::comm
