// SPDX-License-Identifier: Apache-2.0
#include "dp/bucket_queue.h"

#include <gtest/gtest.h>

#include "smp/error.h"
#include "tests/error_of.h"

namespace smp::dp {
namespace {

/// Notes when it is waited for.
class NotedWork final : public Work {
 public:
  NotedWork(std::string name, std::vector<std::string>& events)
      : name_(std::move(name)), events_(events) {}
  bool test() override { return true; }
  void wait() override { events_.push_back("wait " + name_); }

 private:
  const std::string name_;
  std::vector<std::string>& events_;
};

using Events = std::vector<std::string>;

/// Buckets {c, b} and {a}.
class BucketQueueTest : public ::testing::Test {
 protected:
  WorkPtr note(const char* what, size_t bucket) {
    const std::string name = what + std::to_string(bucket);
    events.push_back(name);
    return std::make_shared<NotedWork>(name, events);
  }

  BucketQueue queue(std::vector<std::vector<size_t>> members = {{2, 1}, {0}}) {
    return BucketQueue(std::move(members), {"a", "b", "c"}, policy);
  }

  BucketQueue::Policy policy{[this](size_t bucket) { return note("start ", bucket); },
                             "a test reduced", ". Be patient", /*awaits_all=*/true};

  Events events;
};

TEST_F(BucketQueueTest, StartsInAscendingOrder) {
  BucketQueue queue = this->queue();
  for (int pass = 0; pass < 2; ++pass) {
    queue.mark_ready(0);
    EXPECT_FALSE(queue.start_ready());
    queue.mark_ready(2);
    queue.await(2);
    queue.mark_ready(1);
    EXPECT_FALSE(queue.start_ready());
    EXPECT_EQ(events, Events());
    EXPECT_FALSE(queue.has_started(2));
    queue.mark_ready(2);
    EXPECT_TRUE(queue.start_ready());
    EXPECT_TRUE(queue.has_started(2));
    queue.wait();
    EXPECT_EQ(events, (Events{"start 0", "start 1", "wait start 0", "wait start 1"}));
    events.clear();
    queue.reset();
  }
}

TEST_F(BucketQueueTest, WaitsWhereEnoughAreUnderWay) {
  policy.most_under_way = 2;
  BucketQueue queue = this->queue({{2}, {1}, {0}});
  queue.start_all();
  EXPECT_EQ(events, (Events{"start 0", "start 1", "wait start 0", "start 2"}));
  events.clear();
  queue.wait();
  EXPECT_EQ(events, (Events{"wait start 1", "wait start 2"}));
}

TEST(BucketQueue, NamesTheBucketInErrors) {
  const auto fails = [](size_t) -> WorkPtr { throw CommError("rank 1 failed"); };
  BucketQueue queue({{2, 1}, {0}}, {"a", "b", "c"},
                    {fails, "a test reduced", ". Be patient", /*awaits_all=*/false});
  EXPECT_EQ(smp::testing::error_of<CommError>([&] { queue.start_ready(); }),
            "rank 1 failed [while a test reduced bucket 1 of 2: c ... b. Be patient]");
}

}  // namespace
}  // namespace smp::dp
