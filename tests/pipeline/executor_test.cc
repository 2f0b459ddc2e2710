// SPDX-License-Identifier: Apache-2.0
#include "pipeline/executor.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/channel_pool.h"
#include "comm/threads/thread_world.h"
#include "core/check.h"
#include "dp/step_gradients.h"
#include "pipeline/generators.h"
#include "pipeline/gradient_sums.h"
#include "tests/error_of.h"

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
  const auto pool = std::make_shared<comm::ChannelPool>(comm::make_thread_world(1).front());
  const graph::Graph graph;
  const partitioner::Plan plan;
  const std::vector<Edge> edges;
  const PartitionedGraph partitioned(graph, plan, edges);
  const graph::TensorTable table;
  const std::string text =
      testing::error_of([&] { Executor(schedule, partitioned, {table}, pool, /*ahead=*/1); });
  EXPECT_NE(text.find("schedule: rank 0 never does 0B0"), std::string::npos) << text;
}

constexpr int kMicrobatches = 2;

/// Two stages without operators: an input goes over the edge, and the second stage's backward
/// starts at the other input, which the step returns.
struct TwoStages {
  TwoStages() {
    for (const char* name : {"0", "1"}) {
      graph::Value value;
      value.kind = graph::ValueKind::kInput;
      value.name = name;
      value.meta = graph::TensorMeta::of(at::zeros({1}));
      value.alias_set = graph.alias_sets++;
      graph.inputs.push_back(static_cast<graph::ValueId>(graph.values.size()));
      graph.values.push_back(value);
    }
    graph.roots.push_back({1, graph::kUndefined, {}});
    graph.outputs.push_back(1);
    edge.to = 1;
    edge.values = {0};
    edge.gradients = {0};
    plan.rank_of_stage = {0, 0};
    plan.stage_of_root = {1};
    plan.stage_of_output = {1};
  }

  Schedule schedule() const {
    const auto edges = stage_edges({edge});
    const auto options =
        ScheduleOptions(2, kMicrobatches).ranks(1).rank_of_stage(plan.rank_of_stage).edges(edges);
    return lower(simple(options), edges);
  }

  graph::Graph graph;
  Edge edge;
  partitioner::Plan plan;
};

/// Notes what it is told.
class Notes final : public Observer {
 public:
  void on_step_begin() override { text += "["; }
  void on_begin(size_t index, const Action& action) override {
    text += c10::str(" ", index, ":", to_string(action));
  }
  void on_end(size_t /*index*/, const Action& action) override {
    text += action.is_compute() ? "." : "";
  }
  void on_step_end() override { text += " ]"; }

  std::string text;
};

/// Both stages on one rank, and the operands of a step.
class TwoStagesTest : public ::testing::Test {
 protected:
  TwoStagesTest() {
    for (int m = 0; m < kMicrobatches; ++m) {
      step_.microbatches.push_back({{at::zeros({1}), at::ones({1}) * (m + 3)}, {}, {}, {}});
    }
  }

  std::string error_of_run() {
    return testing::error_of([&] { executor_.run(step_); });
  }

  const TwoStages two_;
  const std::vector<Edge> edges_{two_.edge};
  const PartitionedGraph partitioned_{two_.graph, two_.plan, edges_};
  const graph::TensorTable table_;
  GradientSums sums_;
  const Executor::Setup setup_{table_, &sums_};
  const std::shared_ptr<comm::ChannelPool> pool_ =
      std::make_shared<comm::ChannelPool>(comm::make_thread_world(1).front());
  Executor executor_{two_.schedule(), partitioned_, setup_, pool_, /*ahead=*/1};
  Executor::Step step_;
};

TEST_F(TwoStagesTest, ARankDoesItsListAndReturnsResults) {
  Notes notes;
  step_.keeps_losses = true;
  step_.observers = {&notes};
  const StepResults results = executor_.run(step_);
  EXPECT_EQ(notes.text,
            "[ 0:0F0. 1:1F0. 2:0F1. 3:1F1. 4:1B0. 5:0B0. 6:1B1. 7:1REDUCE 8:0B1. 9:0REDUCE ]");
  ASSERT_EQ(results.outputs.size(), 2u);
  ASSERT_EQ(results.losses.size(), 2u);
  for (int m = 0; m < kMicrobatches; ++m) {
    EXPECT_EQ(results.outputs[m].position, 0);
    EXPECT_EQ(results.outputs[m].microbatch, m);
    EXPECT_EQ(results.outputs[m].value.item<float>(), m + 3);
    EXPECT_EQ(results.losses[m].microbatch, m);
    EXPECT_EQ(results.losses[m].value.item<float>(), m + 3);
  }
}

TEST_F(TwoStagesTest, BackwardsNeedSumsOfGradients) {
  const std::string error = testing::error_of(
      [&] { Executor(two_.schedule(), partitioned_, {table_}, pool_, /*ahead=*/1); });
  EXPECT_NE(error.find("a step with backwards has sums of gradients"), std::string::npos) << error;
}

TEST_F(TwoStagesTest, AForwardThatIsNotInTheListIsSeen) {
  StepResults results;
  executor_.stages().at(0)->forward(/*microbatch=*/1, step_.microbatches[1].inputs, {}, results);
  const std::string error = error_of_run();
  EXPECT_NE(error.find("stage 0 has run the forward of microbatch 1 already"), std::string::npos)
      << error;
}

TEST_F(TwoStagesTest, AMessageThatNoActionTakesIsSeen) {
  // It changes places with the gradient of stage 1.
  Stage& stage = *executor_.stages().at(0);
  stage.message(/*microbatch=*/1, /*edge=*/0, /*is_backward=*/true).push_back(at::ones({1}));
  const std::string error = error_of_run();
  EXPECT_NE(error.find("stage 1 has a message of microbatch 1 after the step"), std::string::npos)
      << error;
}

/// Notes which buckets start.
class Sums final : public dp::StepGradients {
 public:
  /// A bucket for each of two parameters.
  explicit Sums(std::vector<int>& started)
      : StepGradients({{0}, {1}}, {"a", "b"}, comm::make_thread_world(1).front(), options(),
                      {[this, &started](size_t bucket) {
                         started.push_back(this->first + static_cast<int>(bucket));
                         return WorkPtr();
                       },
                       "reducing", "", /*awaits_all=*/false}) {}

  int first = 0;  ///< number of the first bucket

 private:
  static dp::StepGradientOptions options() {
    dp::StepGradientOptions options;
    options.microbatches = kMicrobatches;
    return options;
  }
  void accumulate(int /*shard*/, size_t /*index*/, at::Tensor /*gradient*/, bool /*first*/,
                  core::TensorUpdates& /*updates*/) override {}
  // Nothing is reduced: the tests look at what is accumulated.
  Reduced reduced(size_t /*index*/) override { return {at::zeros({}), at::kFloat, true}; }
  void publish(size_t /*index*/, const at::Tensor& /*mean*/,
               core::TensorUpdates& /*updates*/) override {}
};

/// Values 1 and 2 are parameters of the first sums, 3 and 4 of the second; 0 has none.
class GradientSumsTest : public ::testing::Test {
 protected:
  GradientSumsTest() { second_.first = 2; }

  GradientSums sums(bool fuses = false) {
    return {{&first_, &second_},
            {{}, {&first_, 0}, {&first_, 1}, {&second_, 0}, {&second_, 1}},
            kMicrobatches,
            fuses};
  }

  std::vector<int> started_;
  Sums first_{started_}, second_{started_};
};

TEST_F(GradientSumsTest, StartsBucketsInOneOrderWithTheLastMicrobatch) {
  GradientSums sums = this->sums();
  sums.arm({1, 2, 3, 4});
  for (int parameter = 1; parameter <= 4; ++parameter) sums.add(parameter, 0, at::ones({1}));
  EXPECT_EQ(started_, std::vector<int>());
  sums.add(4, 1, at::ones({1}));
  sums.add(2, 1, at::ones({1}));
  EXPECT_EQ(started_, std::vector<int>()) << "the first bucket is not complete";
  sums.add(1, 1, at::ones({1}));
  EXPECT_EQ(started_, (std::vector<int>{0, 1}));
  sums.add(1, Gradients{{3, at::ones({1})}});
  EXPECT_EQ(started_, (std::vector<int>{0, 1, 2, 3})) << "given in a list";
}

TEST_F(GradientSumsTest, ParametersWithoutGradientAreCompleteWithTheirStage) {
  GradientSums sums = this->sums();
  sums.arm({1, 2});
  sums.add(1, 1, at::ones({1}));
  EXPECT_EQ(started_, (std::vector<int>{0}));
  sums.complete({1, 2});
  EXPECT_EQ(started_, (std::vector<int>{0, 1, 2, 3})) << "no stage here has armed the others";
}

TEST_F(GradientSumsTest, FusedProductsMayFollowALastGradient) {
  GradientSums sums = this->sums(/*fuses=*/true);
  sums.arm({1, 2, 3, 4});
  for (int parameter = 1; parameter <= 4; ++parameter) sums.add(parameter, 1, at::ones({1}));
  EXPECT_EQ(started_, std::vector<int>());
  sums.complete({1, 2});
  EXPECT_EQ(started_, (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace smp::pipeline
