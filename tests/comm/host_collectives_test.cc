// SPDX-License-Identifier: Apache-2.0
// The errors of a rank when another process dies or stalls in the middle of collectives. The other
// process is forked here.

#include "comm/shm/host_collectives.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/failure.h"
#include "tests/comm/quiet_transport.h"
#include "tests/comm/test_tensors.h"

namespace smp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class TwoProcesses : public ::testing::Test {
 public:
  TwoProcesses() : memory_(SharedMemory::create(HostBoard::bytes(2, 2, true))) {
    at::set_num_threads(1);
  }

  ~TwoProcesses() override {
    if (child_ > 0) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
  }

  // Rank 1 does `body` in another process, rank 0 is this one.
  void start(const std::function<void(TwoProcesses&)>& body) {
    const ProcessId self = this_process();
    child_ = fork();
    if (child_ == 0) {
      open(1, {self, this_process()});
      body(*this);
      _exit(0);
    }
    open(0, {self, {child_, self.pid_namespace}});
  }

  void all_reduce(const at::Tensor& tensor, std::chrono::milliseconds timeout) {
    const Collective call{Collective::Kind::kAllReduce, tensor, tensor, ReduceOp::kSum, -1, {}, {}};
    group_->timeout_ms = timeout.count();
    collectives_->run(call, {call.name(), tensor.nbytes(), -1, kMaxTag + ++number_},
                      Deadline(timeout));
  }

 protected:
  const std::shared_ptr<QuietTransport> transport_ = std::make_shared<QuietTransport>();

 private:
  void open(int rank, std::vector<ProcessId> processes) {
    group_->name = "pair";
    group_->rank = rank;
    group_->size = 2;
    group_->world_ranks = {2, 5};
    group_->world_rank = group_->world_ranks[rank];
    const HostLayout layout{{{0, 1}}, 0, rank, std::move(processes)};
    collectives_ = std::make_unique<HostCollectives>(
        std::make_unique<HostBoard>(transport_, group_, layout, memory_), false);
  }

  const std::shared_ptr<GroupState> group_ = std::make_shared<GroupState>();
  const std::shared_ptr<SharedMemory> memory_;
  std::unique_ptr<HostCollectives> collectives_;
  pid_t child_ = 0;
  int number_ = 0;
};

constexpr std::chrono::milliseconds kLong{30'000};

TEST_F(TwoProcesses, AKilledPeerEndsTheWaitAfterWhatItHasDone) {
  start([](TwoProcesses& peer) {
    peer.all_reduce(at::full({100'000}, 2.0F), kLong);
    raise(SIGKILL);
  });
  const at::Tensor tensor = at::ones({100'000});
  all_reduce(tensor, kLong);
  EXPECT_TRUE(same_bits(tensor, at::full({100'000}, 3.0F)));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(error_of<CommError>([&] { all_reduce(tensor, kLong); }),
              AllOf(HasSubstr("all_reduce of 400000 bytes on group 'pair' (here rank 2), "
                              "collective number 2 failed: the process of rank 5 has ended"),
                    HasSubstr("Look at that rank's own output.")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLong);
}

TEST_F(TwoProcesses, AStalledPeerIsNamedWhenTheTimeIsOver) {
  start([](TwoProcesses& peer) {
    peer.all_reduce(at::ones({3}), kLong);
    while (true) pause();
  });
  all_reduce(at::ones({3}), kLong);
  EXPECT_THAT(
      error_of<TimeoutError>([&] { all_reduce(at::ones({3}), std::chrono::milliseconds(200)); }),
      HasSubstr("all_reduce of 12 bytes on group 'pair' (here rank 2), collective number 2 was not "
                "complete within the timeout of 0.2 s; it waits for rank 5."));
  try {
    all_reduce(at::ones({3}), std::chrono::milliseconds(200));
    ADD_FAILURE() << "no error";
  } catch (const core::FailedWait& wait) {
    EXPECT_EQ(wait.kind(), core::Failure::Kind::kTimedOut);
    EXPECT_EQ(wait.missing(), std::vector<int>{5});
  }
}

TEST_F(TwoProcesses, AnAbortEndsTheWait) {
  start([](TwoProcesses&) {
    while (true) pause();
  });
  std::thread aborter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    transport_->abort(1, "rank 1 failed: disk full");
  });
  EXPECT_THAT(error_of<CommError>([&] { all_reduce(at::ones({3}), kLong); }),
              HasSubstr("rank 1 failed: disk full [noticed by all_reduce of 12 bytes"));
  aborter.join();
}

// More steps than buffers, and each process at its own pace.
TEST_F(TwoProcesses, ManyOfAllSizesKeepTheirBits) {
  const auto sum_of = [](int64_t elements) {
    return reduce_by_hand(values_of_all(2, elements, at::kFloat), ReduceOp::kSum);
  };
  start([](TwoProcesses& peer) {
    for (int64_t i = 0; i < 200; ++i) {
      peer.all_reduce(values_of(1, i * i * 31, at::kFloat), kLong);
    }
  });
  for (int64_t i = 0; i < 200; ++i) {
    const at::Tensor tensor = values_of(0, i * i * 31, at::kFloat);
    all_reduce(tensor, kLong);
    ASSERT_TRUE(same_bits(tensor, sum_of(i * i * 31))) << i;
  }
}

/// The group as rank 0 knows it, with a short time-out.
std::shared_ptr<GroupState> group_of_two() {
  auto group = std::make_shared<GroupState>();
  group->name = "world";
  group->rank = 0;
  group->size = 2;
  group->world_ranks = {0, 1};
  group->timeout_ms = 50;
  return group;
}

// Rank 1, another thread, may come late, and finds the call of this one.
TEST(HostCollectives, KeepTheTensorsOfACallThatThreadsMayStillUse) {
  const auto group = group_of_two();
  const HostLayout layout{{{0, 1}}, 0, 0, {this_process(), this_process()}};
  auto board = std::make_unique<HostBoard>(std::make_shared<QuietTransport>(), group, layout,
                                           SharedMemory::create(HostBoard::bytes(2, 2, false)));
  bool freed = false;
  {
    static std::vector<float> numbers(10'000);
    const at::Tensor tensor = at::from_blob(
        numbers.data(), {10'000}, [&](void*) { freed = true; }, at::kFloat);
    const Collective call{Collective::Kind::kAllReduce, tensor, tensor, ReduceOp::kSum, -1, {}, {}};
    HostCollectives collectives(std::move(board), /*in_one_process=*/true);
    EXPECT_THAT(error_of<TimeoutError>([&] {
                  collectives.run(call, {call.name(), tensor.nbytes(), -1, kMaxTag + 1},
                                  Deadline(group->timeout()));
                }),
                HasSubstr("it waits for rank 1."));
  }
  EXPECT_FALSE(freed);
}

// A rank has fallen behind by more steps than half of 32 bits can count.
TEST(HostBoard, WaitsForStepsHoweverFarAway) {
  const auto group = group_of_two();
  const HostLayout layout{{{0, 1}}, 0, 0, {this_process(), this_process()}};
  HostBoard board(std::make_shared<QuietTransport>(), group, layout,
                  SharedMemory::create(HostBoard::bytes(2, 2, false)));
  const Deadline deadline(group->timeout());
  board.begin({"all_reduce", 8, -1, kMaxTag + 1}, deadline);
  board.take_steps(3'000'000'000);
  EXPECT_THAT(error_of<TimeoutError>([&] {
                board.await(HostBoard::Progress::kDone, board.take_steps(1), /*rank=*/1);
              }),
              HasSubstr("it waits for rank 1."));
}

}  // namespace
}  // namespace smp::comm
