// SPDX-License-Identifier: Apache-2.0
#include "comm/message_matcher.h"

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "comm/operation.h"
#include "tests/comm/quiet_transport.h"
#include "tests/comm/test_tensors.h"

namespace smp::comm {
namespace {

using ::testing::HasSubstr;
using OperationPtr = std::shared_ptr<Operation>;

// Rank 0 of a group of three, to which rank 1 sends, or the rank named.
class Receiving : public ::testing::Test {
 protected:
  class MatchingTransport final : public QuietTransport {
   public:
    void start(PendingMessage transfer) override { matcher.post(std::move(transfer)); }

    MessageMatcher matcher{*this};
  };

  Receiving() {
    group_->name = "world";
    group_->rank = 0;
    group_->size = 3;
    group_->world_ranks = {0, 1, 2};
    group_->context = 3;
  }

  static at::Tensor number(int value) { return at::full({1}, value, at::kInt); }
  static MessageMatcher::Address address(Tag tag, int source = 1) { return {3, source, tag}; }

  OperationPtr receive(const at::Tensor& tensor, Tag tag, int source = 1) {
    const Message message{Message::Direction::kReceive, source, tensor.mutable_data_ptr(),
                          tensor.nbytes()};
    auto operation = std::make_shared<Operation>(
        group_, OperationInfo{"irecv", tensor.nbytes(), source, tag},
        std::vector<Round>{{{message}, nullptr}}, std::vector<at::Tensor>{tensor});
    operation->start(transport_);
    return operation;
  }

  void deliver(int value, Tag tag, int source = 1) {
    matcher_.deliver(address(tag, source), &value, sizeof value);
  }

  const std::shared_ptr<GroupState> group_ = std::make_shared<GroupState>();
  MatchingTransport transport_;
  MessageMatcher& matcher_ = transport_.matcher;
};

TEST_F(Receiving, MessagesOfOneTagAreMatchedInOrder) {
  deliver(1, 5);
  deliver(2, 6);
  deliver(3, 5);
  for (const auto& [tag, expected] : {std::pair{5, 1}, {5, 3}, {6, 2}}) {
    const at::Tensor tensor = number(0);
    EXPECT_TRUE(receive(tensor, tag)->done());
    EXPECT_TRUE(same_bits(tensor, number(expected))) << tag;
  }
}

TEST_F(Receiving, ReceivesOfOneTagAreMatchedInOrder) {
  const at::Tensor first = number(0), second = number(0), other = number(0);
  const OperationPtr one = receive(first, 5), two = receive(second, 5), three = receive(other, 6);
  deliver(1, 5);
  EXPECT_TRUE(one->done());
  EXPECT_FALSE(two->done());
  EXPECT_FALSE(three->done());
  deliver(2, 6);
  deliver(3, 5);
  EXPECT_TRUE(two->done());
  EXPECT_TRUE(three->done());
  EXPECT_TRUE(same_bits(first, number(1)));
  EXPECT_TRUE(same_bits(second, number(3)));
  EXPECT_TRUE(same_bits(other, number(2)));
}

TEST_F(Receiving, WhatIsExpectedIsReadIntoTheTensor) {
  const at::Tensor tensor = number(0);
  const OperationPtr operation = receive(tensor, 5);
  const MessageMatcher::Arrival arrival = matcher_.begin(address(5), sizeof(int));
  EXPECT_EQ(arrival.data(), tensor.const_data_ptr());
  EXPECT_FALSE(operation->done());
  matcher_.end(arrival);
  EXPECT_TRUE(operation->done());
}

TEST_F(Receiving, AReceiveMayBePostedWhileItsMessageIsRead) {
  const MessageMatcher::Arrival arrival = matcher_.begin(address(5), sizeof(int));
  const at::Tensor tensor = number(0);
  const OperationPtr operation = receive(tensor, 5);
  EXPECT_FALSE(operation->done());
  const int value = 7;
  std::memcpy(arrival.data(), &value, sizeof value);
  matcher_.end(arrival);
  EXPECT_TRUE(operation->done());
  EXPECT_TRUE(same_bits(tensor, number(7)));
}

TEST_F(Receiving, AnotherLengthIsAnErrorInEitherOrder) {
  const auto expected =
      HasSubstr("expected a message of 4 bytes from rank 1, got one of 2 bytes. Both sides must");
  matcher_.deliver(address(5), "ab", 2);
  EXPECT_THAT(receive(number(0), 5)->error(), expected);
  const OperationPtr posted = receive(number(0), 5);
  matcher_.deliver(address(5), "ab", 2);
  EXPECT_THAT(posted->error(), expected);
  const OperationPtr read = receive(number(0), 5);
  const MessageMatcher::Arrival arrival = matcher_.begin(address(5), 2);
  std::memcpy(arrival.data(), "ab", 2);
  EXPECT_FALSE(read->done());
  matcher_.end(arrival);
  EXPECT_THAT(read->error(), expected);
}

TEST_F(Receiving, WhatADepartedRankHasSentCanBeReceived) {
  const auto expected = HasSubstr("rank 1 of the world has ended its part of the job.");
  const OperationPtr posted = receive(number(0), 6);
  deliver(1, 5);
  matcher_.depart(1);
  EXPECT_THAT(posted->error(), expected);
  EXPECT_EQ(receive(number(0), 5)->error(), "");
  EXPECT_THAT(receive(number(0), 5)->error(), expected);
  EXPECT_THAT(matcher_.departure(1), expected);
  EXPECT_EQ(matcher_.departure(0), "");
}

TEST_F(Receiving, AReceiveFromAnyRankTakesWhatHasComeFirst) {
  deliver(7, 5, 2);
  deliver(8, 5, 1);
  deliver(9, 6, 1);
  for (const auto& [source, expected] : {std::pair{2, 7}, {1, 8}}) {
    const at::Tensor tensor = number(0);
    const OperationPtr operation = receive(tensor, 5, kAnyRank);
    EXPECT_TRUE(operation->done());
    EXPECT_EQ(operation->source(), source);
    EXPECT_TRUE(same_bits(tensor, number(expected)));
  }
  EXPECT_FALSE(receive(number(0), 5, kAnyRank)->done());
}

// Those from one rank and those from any take turns as they were posted.
TEST_F(Receiving, ReceivesFromAnyRankAndFromOneAreMatchedInOrder) {
  const OperationPtr one = receive(number(0), 5, 1), any = receive(number(0), 5, kAnyRank);
  const OperationPtr later = receive(number(0), 5, 1);
  deliver(1, 5, 2);
  EXPECT_TRUE(any->done());
  EXPECT_EQ(any->source(), 2);
  EXPECT_FALSE(one->done());
  const OperationPtr last = receive(number(0), 5, kAnyRank);
  for (const OperationPtr& next : {one, later, last}) {
    EXPECT_FALSE(next->done());
    deliver(1, 5, 1);
    EXPECT_TRUE(next->done());
    EXPECT_EQ(next->source(), 1);
  }
}

TEST_F(Receiving, AReceiveFromAnyRankFailsWhenAllOthersHaveDeparted) {
  const OperationPtr posted = receive(number(0), 5, kAnyRank);
  matcher_.depart(1);
  EXPECT_FALSE(posted->done());
  deliver(1, 5, 2);
  EXPECT_EQ(posted->error(), "");
  EXPECT_EQ(posted->source(), 2);
  const OperationPtr next = receive(number(0), 5, kAnyRank);
  matcher_.depart(2);
  EXPECT_THAT(next->error(), HasSubstr("rank 2 of the world has ended its part of the job."));
  EXPECT_THAT(receive(number(0), 5, kAnyRank)->error(), HasSubstr("has ended its part of the job"));
}

TEST_F(Receiving, AnAbortDropsReceivesAndMessages) {
  const std::weak_ptr<Operation> posted = receive(number(0), 6);
  EXPECT_FALSE(posted.expired());
  deliver(1, 5);
  matcher_.abort();
  EXPECT_TRUE(posted.expired());
  EXPECT_FALSE(receive(number(0), 5)->done());
  deliver(1, 5);
  const std::weak_ptr<Operation> later = receive(number(0), 5);
  EXPECT_TRUE(later.expired());
}

}  // namespace
}  // namespace smp::comm
