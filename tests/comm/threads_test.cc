// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "comm/threads/run_ranks.h"
#include "comm/threads/thread_world.h"
#include "core/check.h"
#include "tests/comm/harness.h"
#include "tests/comm/test_tensors.h"

namespace smp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class OneIntraOpThread : public ::testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};
const auto* const kOneIntraOpThread = ::testing::AddGlobalTestEnvironment(new OneIntraOpThread);

TEST(ThreadWorld, SendCopiesAtOnce) {
  const auto ranks = make_thread_world(2);
  const at::Tensor tensor = at::full({4}, 1, at::kInt);
  const WorkPtr sent = ranks[0]->isend(tensor, 1, 0);
  EXPECT_TRUE(sent->test());
  tensor.fill_(2);
  const at::Tensor received = at::zeros({4}, at::kInt);
  ranks[1]->recv(received, 0, 0);
  EXPECT_TRUE(same_bits(received, at::full({4}, 1, at::kInt)));
}

TEST(ThreadWorld, NeedsARank) {
  EXPECT_THAT(error_of<UsageError>([] { make_thread_world(0); }),
              HasSubstr("expected at least 1 rank, got 0"));
}

TEST(ThreadWorld, AbortEndsWaitsOfAllGroupsNowAndLater) {
  std::atomic<int> ended{0};
  run_ranks(4, [&](const CommunicatorPtr& world) {
    const int side = world->rank() % 2;
    const CommunicatorPtr half = world->split({side, side + 2}, "half");
    const at::Tensor tensor = at::zeros({2});
    if (world->rank() == 3) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      half->abort("disk full");
      half->abort("a later reason");
    } else {
      EXPECT_THAT(error_of<CommError>([&] { half->recv(tensor, 1 - half->rank(), 0); }),
                  AllOf(HasSubstr("rank 3 failed: disk full"),
                        HasSubstr("[noticed by irecv of 8 bytes from rank ")));
    }
    EXPECT_THAT(error_of<CommError>([&] { world->barrier(); }),
                HasSubstr("rank 3 failed: disk full"));
    EXPECT_TRUE(world->irecv(tensor, 0, 0)->test());
    ++ended;
  });
  EXPECT_EQ(ended, 4);
}

TEST(RunRanks, RethrowsTheCauseWithItsType) {
  const auto run = [] {
    run_ranks(4, [](const CommunicatorPtr& world) {
      if (world->rank() == 2) {
        throw std::out_of_range("boom");
      }
      world->barrier();
    });
  };
  EXPECT_EQ(error_of<std::out_of_range>(run), "boom");
}

TEST(RunRanks, TheOthersSeeTheCauseInTheirWait) {
  std::atomic<int> seen{0};
  const auto run = [&] {
    run_ranks(3, [&](const CommunicatorPtr& world) {
      SMP_CHECK_WITH(ConfigError, world->rank() != 1, "a bad file");
      const std::string text = error_of<CommError>([&] { world->barrier(); });
      EXPECT_THAT(text, StartsWith("[smp rank " + std::to_string(world->rank()) +
                                   "] rank 1 failed: [smp rank 1] a bad file"));
      ++seen;
    });
  };
  EXPECT_EQ(error_of<ConfigError>(run), "[smp rank 1] a bad file");
  EXPECT_EQ(seen, 2);
}

/// The gradient of a kernel is summed in another order by each number of threads. oneDNN asks
/// OpenMP for that, which gives a new thread the environment's number; it is the first that runs
/// there.
at::Tensor kernel_gradient(const at::Tensor& x, const at::Tensor& slope) {
  const at::Tensor kernel = at::empty({8, 3, 5});  // its values do not matter
  return std::get<1>(at::convolution_backward(slope, x, kernel, at::OptionalIntArrayRef(), {1}, {0},
                                              {1}, /*transposed=*/false, {0}, /*groups=*/1,
                                              {false, true, false}));
}

TEST(RunRanksDeathTest, RanksHaveTheIntraOpThreadsOfTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const char* before = std::getenv("OMP_NUM_THREADS");
  setenv("OMP_NUM_THREADS", "4", 1);  // set for the process that starts here
  const auto compare = [] {
    at::set_num_threads(1);
    const at::Tensor x = at::randn({64, 3, 50}), slope = at::randn({64, 8, 46});
    at::Tensor got;
    run_ranks(1, [&](const CommunicatorPtr&) { got = kernel_gradient(x, slope); });
    std::exit(at::equal(got, kernel_gradient(x, slope)) ? 0 : 1);
  };
  EXPECT_EXIT(compare(), ::testing::ExitedWithCode(0), "");
  before == nullptr ? unsetenv("OMP_NUM_THREADS") : setenv("OMP_NUM_THREADS", before, 1);
}

TEST(RunRanks, ReturnsWhenAllRanksHaveEnded) {
  std::atomic<int> ended{0};
  run_ranks(3, [&](const CommunicatorPtr& world) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10 * world->rank()));
    ++ended;
  });
  EXPECT_EQ(ended, 3);
}

}  // namespace
}  // namespace smp::comm
