// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a session meet.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/session_world.h"
#include "comm/store/store_communicator.h"
#include "smp/error.h"
#include "tests/error_of.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;

TEST(SessionStore, IsServedAndReached) {
  int port = 0;
  const auto served = serve_store(milliseconds(60'000), port);
  EXPECT_GT(port, 0);
  const auto reached = connect_to_store("127.0.0.1", port, milliseconds(60'000));
  served->set("key", "value");
  EXPECT_EQ(reached->get_to_str("key"), "value");
}

TEST(SessionStore, SaysWhyItIsNotReached) {
  // On a busy machine c10d may say only after that time that no process listens.
  EXPECT_THAT(smp::testing::error_of<CommError>(
                  [] { connect_to_store("127.0.0.1", 1, milliseconds(300)); }),
              AnyOf(HasSubstr("the store of rank 0 at 127.0.0.1 port 1 could not be reached"),
                    HasSubstr("has given no answer within")));
}

TEST(SessionStore, SaysWhyItIsNotOpened) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 3;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  std::string text;
  try {
    int port = 0;
    serve_store(milliseconds(500), port);
  } catch (const CommError& error) {
    text = error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_THAT(text, HasSubstr("no store could be opened, at which the ranks would meet: "));
}

TEST(SessionWorld, OfOneProcess) {
  SessionWorld session = SessionWorld::alone();
  EXPECT_EQ(session.world()->size(), 1);
  EXPECT_EQ(session.hosts().size(), 1U);
  session.finish();
}

}  // namespace
}  // namespace smp::comm
