// SPDX-License-Identifier: Apache-2.0
// Calls of collectives that are wrong, or that do not match those of other ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "core/check.h"
#include "core/public_call.h"
#include "tests/comm/harness.h"
#include "tests/comm/test_tensors.h"

namespace smp::comm {
namespace {

using core::PublicCall;
using core::PublicCallScope;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class CollectiveErrors : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CollectiveErrors, ::testing::ValuesIn(group_sizes()),
                         ::testing::PrintToStringParamName());

PublicCall step_number(int number) {
  return {c10::str("call ", number, " of step function \"train\""), core::kAnyStep};
}

// The group works after an error.
void expect_goes_on(Communicator& group) {
  const at::Tensor ones = at::ones({1000});
  group.all_reduce(ones);
  EXPECT_TRUE(same_bits(ones, at::full({1000}, static_cast<float>(group.size()))));
}

// Every rank throws, says the same, and can go on.
TEST_P(CollectiveErrors, CallsThatDoNotMatchAreAnErrorThatSaysWhoCalledWhat) {
  if (GetParam() == 1) {
    return;  // no rank to differ from
  }
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const bool first = group->rank() == 0;
    EXPECT_THAT(
        error_of<CommError>([&] { group->all_reduce(at::ones({first ? 4 : 8}, at::kByte)); }),
        AllOf(HasSubstr("all_reduce of "), HasSubstr(" bytes on group 'world' (here rank "),
              HasSubstr("does not match the other ranks' calls: rank 0 called all_reduce (sum) of "
                        "4 x Byte, rank 1 called all_reduce (sum) of 8 x Byte"),
              HasSubstr("All ranks must call the same collectives of a group in the same order")));
    EXPECT_THAT(
        error_of<CommError>([&] {
          if (first) {
            group->barrier();
          } else {
            group->broadcast(at::ones({3}), 1);
          }
        }),
        HasSubstr("rank 0 called barrier, rank 1 called broadcast of 3 x Float with root 1"));
    EXPECT_THAT(error_of<CommError>([&] {
                  group->all_reduce(at::ones({3}), first ? ReduceOp::kMin : ReduceOp::kMax);
                }),
                HasSubstr("rank 0 called all_reduce (min) of 3 x Float, rank 1 called all_reduce "
                          "(max) of 3 x Float"));
    EXPECT_THAT(error_of<CommError>([&] {
                  std::vector<int64_t> sends(group->size(), 1), receives(group->size(), 1);
                  sends[1] += first ? 1 : 0;
                  const int64_t sum = group->size();
                  group->all_to_all(at::ones({sum}), receives, at::ones({sum + (first ? 1 : 0)}),
                                    sends);
                }),
                HasSubstr("rank 0 sends 2 elements to rank 1, which expects 1. The input split of "
                          "the one must be"));
    EXPECT_THAT(error_of<CommError>([&] { group->shared_tensor(first ? 5 : 6, at::kFloat); }),
                HasSubstr("rank 0 called shared_tensor of 5 x Float, rank 1 called shared_tensor"));
    expect_goes_on(*group);
  });
}

// The same collective, within another call of the user's.
TEST_P(CollectiveErrors, CallsOfTheUsersThatDoNotMatchAreNamedByAll) {
  if (GetParam() == 1) {
    return;
  }
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const bool first = group->rank() == 0;
    const auto in_others = [&](const std::function<void()>& collective) {
      const PublicCallScope here(first ? PublicCall("smp::save", "smp::save") : step_number(4));
      return error_of<CommError>(collective);
    };
    const auto expected =
        AllOf(HasSubstr(first ? ", in smp::save does not match the other ranks' calls: "
                              : ", in call 4 of step function \"train\" does not match"),
              HasSubstr("rank 0 is in smp::save, rank 1 is in call 4 of step function \"train\""),
              HasSubstr("All ranks must make the same calls in the same order: look for one that "
                        "only some ranks make, as within if (smp::rank() == 0)."));
    EXPECT_THAT(in_others([&] { all_gather_bytes(*group, "bytes"); }), expected);
    EXPECT_THAT(in_others([&] { group->async().all_reduce(at::ones({9}))->wait(); }), expected);
    EXPECT_THAT(in_others([&] {
                  group->start(at::kCPU, [](TaskCollectives& task) { task.barrier(); })->wait();
                }),
                expected);
    EXPECT_THAT(in_others([&] { group->shared_tensor(5, at::kFloat); }), expected);
    EXPECT_THAT(error_of<CommError>([&] {
                  const PublicCallScope here(first ? PublicCall() : step_number(4));
                  group->barrier();
                }),
                HasSubstr("rank 0 called barrier, rank 1 is in call 4 of step function"));
    expect_goes_on(*group);
  });
}

// Collectives of the user's own are compared as such, and a step is a step. Work started in a call
// belongs to it, whatever the rank does when its turn comes.
TEST_P(CollectiveErrors, CallsOfOneKindMatch) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    const bool first = group->rank() == 0;
    {
      const PublicCallScope here(first ? PublicCall("smp::barrier", core::kOwnCollective)
                                       : PublicCall());
      group->barrier();
    }
    WorkPtr work;
    {
      const PublicCallScope here(step_number(group->rank()));
      group->barrier();
      work = group->async().all_reduce(at::ones({3}));
    }
    work->wait();
    EXPECT_EQ(core::this_public_call().text(), "");
  });
}

TEST_P(CollectiveErrors, SplitRefusesWrongLists) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    EXPECT_THAT(error_of<UsageError>([&] { group->split({}, "x"); }),
                HasSubstr("which asks, must be among them"));
    EXPECT_THAT(
        error_of<UsageError>([&] {
          group->split({group->rank(), group->rank()}, "x");
        }),
        AllOf(HasSubstr("split of group 'world' into ranks ["), HasSubstr("they must ascend")));
    EXPECT_THAT(error_of<UsageError>([&] {
                  group->split({group->rank(), 99}, "x");
                }),
                HasSubstr("they must lie in 0 to"));
    if (group->size() > 1) {
      // Rank 0 wants to be with 1, but 1 to be alone; then only rank 0 passes a wrong list.
      const bool zero = group->rank() == 0;
      const std::vector<int> alone{group->rank()};
      EXPECT_THAT(error_of<UsageError>([&] {
                    group->split(zero ? std::vector<int>{0, 1} : alone, "x");
                  }),
                  HasSubstr("rank 0 passes the ranks [0, 1] but rank 1, one of them, passes [1]"));
      EXPECT_THAT(
          error_of<UsageError>([&] { group->split(zero ? std::vector<int>{} : alone, "x"); }),
          HasSubstr(zero ? "must be among them" : "rank 0 passes a list of ranks that is refused"));
    }
  });
}

TEST_P(CollectiveErrors, ATimeOutNamesTheRanksThatHaveNotCome) {
  if (GetParam() == 1) {
    return;
  }
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    std::vector<int> all(group->size());
    std::iota(all.begin(), all.end(), 0);
    const CommunicatorPtr part = group->split(all, "part");
    part->barrier();
    const bool late = group->rank() == group->size() - 1;
    if (!late) {
      part->set_timeout(std::chrono::milliseconds(100));
      const auto expected =
          AllOf(HasSubstr("all_reduce of 8 bytes on group 'part' (here rank "),
                // On a busy machine others of the early ranks may be late, too.
                ContainsRegex(c10::str("was not complete within the timeout of 0.1 s; it waits for "
                                       "ranks? ([0-9]+, )*",
                                       group->size() - 1, "\\.")),
                HasSubstr("Check that these ranks call the same collectives"));
      const WorkPtr work = part->async().all_reduce(at::ones({2}), ReduceOp::kSum);
      EXPECT_FALSE(work->test());
      EXPECT_THAT(error_of<TimeoutError>([&] { work->wait(); }), expected);
      EXPECT_THAT(error_of<TimeoutError>([&] { part->all_reduce(at::ones({2})); }), expected);
    }
    group->barrier();
  });
}

TEST_P(CollectiveErrors, RefuseBadArguments) {
  on_every_rank(GetParam(), [](const CommunicatorPtr& group) {
    EXPECT_THAT(error_of<UsageError>(
                    [&] { group->all_reduce(at::ones({2}, at::kBool), ReduceOp::kAverage); }),
                HasSubstr("average is not defined for Bool"));
    EXPECT_THAT(
        error_of<UsageError>([&] {
          group->all_reduce(at::ones({2, 3}).t());
        }),
        HasSubstr("expected tensor to be contiguous, got sizes [3, 2] with strides [1, 3]"));
    EXPECT_THAT(error_of<UsageError>([&] { group->all_reduce(at::Tensor()); }),
                HasSubstr("tensor is undefined"));
    EXPECT_THAT(error_of<UsageError>([&] { group->broadcast(at::ones({2}, at::kMeta), 0); }),
                HasSubstr("expected tensor to be on the CPU, got meta. Copy it to the CPU"));
    EXPECT_THAT(error_of<UsageError>([&] { group->all_reduce(at::eye(2).to_sparse()); }),
                HasSubstr("to be dense, got a tensor of layout Sparse. Pass to_dense() of it."));
    EXPECT_THAT(
        error_of<UsageError>([&] { group->broadcast(at::ones({2}, at::kComplexFloat).conj(), 0); }),
        HasSubstr("expected tensor to hold its values, got a conjugate or negative view"));
    EXPECT_THAT(error_of<UsageError>([&] { group->broadcast(at::ones({2}), 9); }),
                HasSubstr("expected root in 0 to "));
    EXPECT_THAT(error_of<UsageError>([&] { group->all_gather(at::ones({99}), at::ones({2})); }),
                HasSubstr("Allocate size() times the input"));
    EXPECT_THAT(error_of<UsageError>([&] { group->reduce_scatter(at::ones({2}), at::ones({99})); }),
                HasSubstr("reduce_scatter on group 'world': expected an input of "));
    EXPECT_THAT(error_of<UsageError>(
                    [&] { group->all_to_all(at::ones({2}), {}, at::ones({2}, at::kInt), {}); }),
                HasSubstr("expected output and input of the same type, got Float and Int"));
    EXPECT_THAT(
        error_of<UsageError>([&] { group->all_to_all(at::ones({2}), {7}, at::ones({2}), {}); }),
        HasSubstr("the 2 elements of the output do not divide into [7], one number for"));
    EXPECT_THAT(error_of<UsageError>([&] { group->all_reduce(at::ones({2}), ReduceOp::kBitAnd); }),
                HasSubstr("bitwise and is not defined for Float. Convert the tensor"));
    EXPECT_THAT(error_of<UsageError>([&] { group->shared_tensor(-1, at::kFloat); }),
                HasSubstr("shared_tensor on group 'world': expected 0 elements or more, got -1"));
    EXPECT_THAT(error_of<UsageError>([&] { group->set_timeout(std::chrono::seconds(0)); }),
                HasSubstr("expected a positive time, got 0 ms"));
  });
}

}  // namespace
}  // namespace smp::comm
