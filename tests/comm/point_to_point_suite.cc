// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/check.h"
#include "tests/comm/harness.h"
#include "tests/comm/test_tensors.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

class PointToPoint : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PointToPoint, ::testing::ValuesIn(group_sizes()),
                         ::testing::PrintToStringParamName());

// Two ranks at the least; a group of one only sends to itself.
class Pair : public ::testing::TestWithParam<int> {};
std::vector<int> channel_sizes_from_two() {
  std::vector<int> sizes;
  for (const int size : group_sizes()) {
    if (size > 1) {
      sizes.push_back(size);
    }
  }
  return sizes;
}
INSTANTIATE_TEST_SUITE_P(Ranks, Pair, ::testing::ValuesIn(channel_sizes_from_two()),
                         ::testing::PrintToStringParamName());
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Pair);  // a world of one rank has none

TEST_P(PointToPoint, EveryRankExchangesWithEveryRank) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for (const int64_t elements : {0, 1, 7, 1000, 1 << 18}) {
      std::vector<at::Tensor> received;
      std::vector<WorkPtr> works;
      for (int peer = 0; peer < group->size(); ++peer) {
        received.push_back(at::zeros({elements}, at::kFloat));
        works.push_back(group->irecv(received.back(), peer, group->rank()));
        works.push_back(
            group->isend(values_of(10 * group->rank() + peer, elements, at::kFloat), peer, peer));
      }
      for (const WorkPtr& work : works) {
        work->wait();
      }
      for (int peer = 0; peer < group->size(); ++peer) {
        EXPECT_TRUE(
            same_bits(received[peer], values_of(10 * peer + group->rank(), elements, at::kFloat)));
      }
    }
  });
}

at::Tensor number(int value) { return at::full({1}, value, at::kInt); }

// Both with receives posted ahead and with messages that wait for their receive.
TEST_P(Pair, MessagesOfATagComeInOrderAndTagsAreApart) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    constexpr int kCount = 20;
    for (const bool posted_first : {true, false}) {
      std::vector<at::Tensor> received;
      std::vector<WorkPtr> works;
      const auto post = [&](Tag tag) {
        for (int i = 0; i < kCount; ++i) {
          received.push_back(number(-1));
          works.push_back(group->irecv(received.back(), 0, tag));
        }
      };
      if (group->rank() == 1 && posted_first) {
        post(2);
        post(kMaxTag);
      }
      group->barrier();
      for (int i = 0; group->rank() == 0 && i < kCount; ++i) {
        group->send(number(1000 + i), 1, kMaxTag);
        group->send(number(i), 1, 2);
      }
      group->barrier();
      if (group->rank() == 1 && !posted_first) {
        post(2);
        post(kMaxTag);
      }
      for (size_t i = 0; i < works.size(); ++i) {
        works[i]->wait();
        const int expected = i < kCount ? static_cast<int>(i) : 1000 + static_cast<int>(i) - kCount;
        EXPECT_EQ(received[i].item<int>(), expected);
      }
    }
  });
}

TEST_P(Pair, ASentTensorMayBeChangedAfterTheWait) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    for (const int64_t elements : {10, 1 << 20}) {
      const at::Tensor tensor = at::zeros({elements}, at::kByte);
      if (group->rank() == 0) {
        tensor.fill_(7);
        group->send(tensor, 1, 3);
        tensor.fill_(9);
      } else if (group->rank() == 1) {
        group->recv(tensor, 0, 3);
        EXPECT_TRUE(same_bits(tensor, at::full({elements}, 7, at::kByte)));
      }
      group->barrier();
    }
  });
}

TEST_P(Pair, WorkKeepsItsTensorAlive) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    if (group->rank() == 0) {
      const WorkPtr work = group->isend(at::full({1 << 18}, 5, at::kInt), 1, 0);
      group->barrier();
      work->wait();
    } else {
      const at::Tensor tensor = at::empty({1 << 18}, at::kInt);
      group->barrier();
      if (group->rank() == 1) {
        group->recv(tensor, 0, 0);
        EXPECT_TRUE(same_bits(tensor, at::full({1 << 18}, 5, at::kInt)));
      }
    }
  });
}

TEST_P(Pair, AMessageOfAnotherLengthIsAnErrorThatGivesBoth) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    // Shorter and longer than expected, by the short and the long protocol of MPI.
    for (const int64_t sent : {3, 20, 1 << 20}) {
      if (group->rank() == 0) {
        group->isend(at::zeros({sent}, at::kByte), 1, 5)->wait();
      } else if (group->rank() == 1) {
        const at::Tensor tensor = at::zeros({8}, at::kByte);
        EXPECT_THAT(error_of<CommError>([&] { group->recv(tensor, 0, 5); }),
                    AllOf(HasSubstr("irecv of 8 bytes from rank 0 with tag 5 on group 'world'"),
                          HasSubstr("expected a message of 8 bytes from rank 0, got one of " +
                                    std::to_string(sent) + " bytes")));
      }
    }
    group->barrier();
  });
}

TEST_P(Pair, AWaitThatTakesTooLongNamesWhatItWaitsFor) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    if (group->rank() == 0) {
      group->set_timeout(milliseconds(100));
      const at::Tensor tensor = at::zeros({10});
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THAT(
          error_of<TimeoutError>([&] { group->recv(tensor, 1, 77); }),
          AllOf(
              HasSubstr("irecv of 40 bytes from rank 1 with tag 77 on group 'world' (here rank 0"),
              HasSubstr("was not complete within the timeout of 0.1 s; it waits for rank 1."),
              HasSubstr("Check that the peer posts the matching call")));
      EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(100));
      EXPECT_THAT(
          error_of<TimeoutError>([&] { group->all_reduce(tensor); }),
          AllOf(HasSubstr("all_reduce of 40 bytes on group 'world'"), HasSubstr("waits for rank"),
                HasSubstr("call the same collectives of this group in the same order")));
    }
  });
}

// Messages from all others, with receives that are posted before and after they come.
TEST_P(Pair, AReceiveFromAnyRankSaysFromWhich) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const int others = group->size() - 1;
    if (group->rank() != 0) {
      for (int i = 0; i < 2; ++i) {
        group->send(number(group->rank()), 0, 4);
        group->barrier();
      }
      return;
    }
    std::vector<int> counts(group->size(), 0);
    const auto receive = [&](bool barrier_first) {
      std::vector<at::Tensor> received;
      std::vector<ReceiveWorkPtr> works;
      if (barrier_first) {
        group->barrier();
      }
      for (int i = 0; i < others; ++i) {
        received.push_back(number(-1));
        works.push_back(group->irecv_from_any(received.back(), 4));
      }
      for (int i = 0; i < others; ++i) {
        works[i]->wait();
        EXPECT_TRUE(same_bits(received[i], number(works[i]->source())));
        ++counts[works[i]->source()];
      }
      if (!barrier_first) {
        group->barrier();
      }
    };
    receive(false);
    receive(true);
    EXPECT_EQ(counts[0], 0);
    EXPECT_EQ(std::count(counts.begin(), counts.end(), 2), others);
  });
}

TEST_P(Pair, AReceiveFromAnyRankThatTakesTooLongSaysSo) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    if (group->rank() == 0) {
      group->set_timeout(milliseconds(100));
      EXPECT_THAT(error_of<TimeoutError>([&] { group->irecv_from_any(number(0), 9)->wait(); }),
                  AllOf(HasSubstr("irecv of 4 bytes from any rank with tag 9 on group 'world'"),
                        HasSubstr("of 0.1 s; it waits for any rank. Check that the peer posts")));
    }
  });
}

TEST_P(PointToPoint, RefusesBadArguments) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const at::Tensor tensor = at::zeros({2});
    EXPECT_THAT(error_of<UsageError>([&] { group->isend(tensor, group->size(), 0); }),
                HasSubstr("isend on group 'world': expected destination in 0 to " +
                          std::to_string(group->size() - 1)));
    EXPECT_THAT(error_of<UsageError>([&] { group->irecv(tensor, -1, 0); }),
                HasSubstr("expected source in 0 to "));
    EXPECT_THAT(error_of<UsageError>([&] { group->irecv(tensor, 0, kMaxTag + 1); }),
                HasSubstr("expected a tag in 0 to 1048575, got 1048576"));
  });
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return t.tv_sec + t.tv_usec * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// There are often more ranks than cores: who waits must leave the core to who computes.
TEST_P(Pair, WaitingCostsLittleCpuTime) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const at::Tensor token = at::zeros({1});
    group->barrier();
    if (group->rank() == 0) {
      group->recv(token, 1, 1);
      std::this_thread::sleep_for(milliseconds(600));
      group->send(token, 1, 0);
    } else if (group->rank() == 1) {
      const double before = cpu_seconds();
      const auto start = std::chrono::steady_clock::now();
      group->send(token, 0, 1);  // so that the wait is no shorter than the other's sleep
      group->recv(token, 0, 0);
      // On a busy machine the message comes later.
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
      const double used = cpu_seconds() - before;
      ::testing::Test::RecordProperty("share_of_a_core", std::to_string(used / waited.count()));
      EXPECT_LT(used, 0.3 * waited.count());
    }
    group->barrier();
  });
}

TEST_P(Pair, LargeMessagesMoveWhileBothSidesCompute) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const at::Tensor moved = at::zeros({1}, at::kInt);
    // Waits as long as it takes on a busy machine: without progress no time is enough.
    for (auto computing = milliseconds(100); !moved.item<int>(); computing *= 2) {
      ASSERT_LT(computing, std::chrono::seconds(10));
      const at::Tensor tensor = at::full({16 << 20}, group->rank() + 1, at::kByte);
      moved.fill_(1);
      if (group->rank() < 2) {
        const WorkPtr work =
            group->rank() == 0 ? group->isend(tensor, 1, 0) : group->irecv(tensor, 0, 0);
        std::this_thread::sleep_for(computing);  // no call that could make progress
        moved.fill_(work->test() ? 1 : 0);       // one look moves no 16 MiB
        work->wait();
        EXPECT_TRUE(same_bits(tensor, at::full({16 << 20}, 1, at::kByte)));
      }
      group->all_reduce(moved, ReduceOp::kMin);
    }
  });
}

}  // namespace
}  // namespace smp::comm
