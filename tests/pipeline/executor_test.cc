// SPDX-License-Identifier: Apache-2.0
#include "pipeline/executor.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "comm/channel_pool.h"
#include "comm/threads/thread_communicator.h"
#include "core/check.h"
#include "pipeline/generators.h"

namespace smp::pipeline {
namespace {

TEST(MessagesHeld, CountsFromAReceiveToTheLastComputationOfItsMicrobatch) {
  const Schedule schedule = parse_schedule(
      "schedule ranks=2 microbatches=3 backward=yes rank_of_stage=0,1\n"
      "rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1 0RECV_B0<1 0RECV_B1<1 0B0 0B1 "
      "0RECV_B2<1 0B2 0REDUCE\n"
      "rank 1: 1RECV_F0<0 1F0 1RECV_F1<0 1F1 1B0 1SEND_B0>0 1RECV_F2<0 1F2 1B1 1SEND_B1>0 1B2 "
      "1SEND_B2>0 1REDUCE\n");
  EXPECT_EQ(messages_held(schedule, 0, 1, /*is_backward=*/false), 2);
  EXPECT_EQ(messages_held(schedule, 0, 1, /*is_backward=*/true), 2);
}

// Each of the schedules as its formula has it.
TEST(MessagesHeld, IsTheNumberOfMicrobatchesInFlight) {
  const auto edges = chain_edges(3);
  const auto options = ScheduleOptions(3, 8).ranks(3).rank_of_stage({0, 1, 2}).edges(edges);
  const Schedule all_forwards_first = lower(simple(options), edges);
  EXPECT_EQ(messages_held(all_forwards_first, 0, 1, false), 8);
  EXPECT_EQ(messages_held(all_forwards_first, 1, 2, false), 8);
  EXPECT_EQ(messages_held(all_forwards_first, 0, 1, true), 1);
  EXPECT_EQ(messages_held(all_forwards_first, 0, 2, false), 0);  // no such edge

  const Schedule evaluation = lower(forward_only(options), edges);
  EXPECT_EQ(messages_held(evaluation, 0, 1, false), 1);
  EXPECT_EQ(messages_held(evaluation, 0, 1, true), 0);

  auto few = options;
  few.active_microbatches(2);
  EXPECT_LE(messages_held(lower(interleaved(few), edges), 0, 1, false), 2);
}

TEST(Executor, RefusesAScheduleThatDoesNotGetToItsEnd) {
  const Schedule schedule = parse_schedule(
      "schedule ranks=1 microbatches=1 backward=yes rank_of_stage=0\nrank 0: 0F0 0REDUCE\n");
  std::string text;
  try {
    const auto pool = std::make_shared<comm::ChannelPool>(comm::make_thread_world(1).front());
    Executor(schedule, graph::Graph(), {}, pool, /*ahead=*/1);
  } catch (const Error& error) {
    text = error.what();
  }
  EXPECT_NE(text.find("schedule: rank 0 never does 0B0"), std::string::npos) << text;
}

}  // namespace
}  // namespace smp::pipeline
