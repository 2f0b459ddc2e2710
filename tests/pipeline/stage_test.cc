// SPDX-License-Identifier: Apache-2.0
#include "pipeline/stage.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "graph/tracer.h"
#include "partitioner/complete.h"
#include "tests/error_of.h"

namespace smp::pipeline {
namespace {

using Tensors = std::vector<at::Tensor>;

/// (((x * a) * b).tanh() * b).sum(), of which stage 0 runs the first product.
class StageTest : public ::testing::Test {
 protected:
  StageTest() {
    table_.add(graph::ValueKind::kParameter, "a", a_);
    table_.add(graph::ValueKind::kParameter, "b", b_);
    graph::TraceOptions options;
    options.step_name = "stages";
    options.table = &table_;
    graph::Tracer tracer(std::move(options));
    graph_ = tracer
                 .run({x_},
                      [&](const Tensors& in) {
                        const at::Tensor loss = this->loss(in[0]);
                        tracer.backward({loss}, {});
                        return Tensors{loss};
                      })
                 .recorded;
    std::vector<int> stage_of_operator(graph_->operators.size(), 1);
    stage_of_operator[0] = 0;
    plan_ = partitioner::complete_plan(*graph_, {0, 0}, stage_of_operator, {});
    edges_ = edges_of(*graph_, plan_);
    partitioned_ = std::make_unique<PartitionedGraph>(*graph_, plan_, edges_);
    for (const int stage : {0, 1}) {
      stages_.push_back(std::make_unique<Stage>(*partitioned_, stage, /*microbatches=*/2, table_));
    }
  }

  at::Tensor loss(const at::Tensor& x) const { return ((x * a_ * b_).tanh() * b_).sum(); }

  Message& message(int stage, int microbatch, bool is_backward) {
    return stages_[stage]->message(microbatch, /*edge=*/0, is_backward);
  }
  void forward(int microbatch, const at::Tensor& x) {
    stages_[0]->forward(microbatch, {x}, {}, results_);
    message(0, microbatch, false).swap(message(1, microbatch, false));
    stages_[1]->forward(microbatch, {x}, {}, results_);
  }

  const at::Tensor x_ = at::arange(1, 5, at::kFloat) / 8;
  const at::Tensor a_ = (at::arange(2, 6, at::kFloat) / 4).requires_grad_();
  const at::Tensor b_ = (at::arange(3, 7, at::kFloat) / 8).requires_grad_();
  graph::TensorTable table_;
  std::shared_ptr<graph::Graph> graph_;
  partitioner::Plan plan_;
  std::vector<Edge> edges_;
  std::unique_ptr<PartitionedGraph> partitioned_;
  std::vector<std::unique_ptr<Stage>> stages_;
  StepResults results_;
};

// Facts of its own for each of hundreds of stages would take hundreds of megabytes.
TEST_F(StageTest, StagesShareTheFactsOfTheirGraph) {
  for (const auto& stage : stages_) EXPECT_EQ(&stage->program().facts, &partitioned_->facts);
}

// Tensors for all values of the graph in each of hundreds of stages would take megabytes. (Under a
// sanitizer the allocator tells nothing, and every stage passes.)
TEST_F(StageTest, AStageHoldsNothingOfTheValuesOfOthers) {
  const auto bytes = [] {
    const auto info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  constexpr size_t kOthers = 100'000;
  graph::Graph graph = *graph_;
  for (size_t i = 0; i < kOthers; ++i) {
    graph::Value other;
    other.meta = graph::TensorMeta::of(x_);
    graph.values.push_back(other);
  }
  const PartitionedGraph partitioned(graph, plan_, edges_);
  std::vector<std::unique_ptr<Stage>> stages(10);
  const size_t before = bytes();
  for (auto& stage : stages) stage = std::make_unique<Stage>(partitioned, 0, 2, table_);
  EXPECT_LT(bytes() - before, kOthers * sizeof(at::Tensor));
  stages.front()->forward(0, {x_}, {}, results_);
  const auto is_defined = [](const at::Tensor& tensor) { return tensor.defined(); };
  EXPECT_TRUE(
      std::none_of(partitioned.environment->begin(), partitioned.environment->end(), is_defined))
      << "another stage runs now";
}

// Microbatches that are in flight together keep their histories apart, whole or in two parts.
TEST_F(StageTest, TwoStagesHaveTheGradientsOfPlainLibtorch) {
  for (const bool is_split : {false, true}) {
    results_.outputs.clear();
    forward(0, x_);
    forward(1, x_ * 3);
    for (const int m : {0, 1}) {
      std::vector<Gradients> gradients(2);
      for (const int stage : {1, 0}) {
        if (is_split) {
          EXPECT_TRUE(
              stages_[stage]->backward({Action::Kind::kBackwardInput, stage, m}, nullptr).empty());
          gradients[stage] =
              stages_[stage]->backward({Action::Kind::kBackwardWeight, stage, m}, nullptr);
        } else {
          gradients[stage] = stages_[stage]->backward({Action::Kind::kBackward, stage, m}, nullptr);
        }
        if (stage == 1) message(1, m, true).swap(message(0, m, true));
      }
      const at::Tensor plain = loss(m == 0 ? x_ : x_ * 3);
      const Tensors expected = torch::autograd::grad({plain}, {a_, b_});
      EXPECT_TRUE(at::equal(results_.outputs[m].value, plain.detach()));
      for (const int stage : {0, 1}) {
        ASSERT_EQ(gradients[stage].size(), 1u);
        EXPECT_TRUE(at::equal(gradients[stage][0].second, expected[stage])) << m << stage;
      }
    }
    for (const auto& stage : stages_) stage->check_done();
  }
}

TEST_F(StageTest, AMicrobatchLeavesNoTensorBehind) {
  for (const bool is_forgotten : {false, true}) {
    const at::Tensor x = x_.clone();
    stages_[0]->forward(0, {x}, {}, results_);
    const auto sent = message(0, 0, false).front().storage().getWeakStorageImpl();
    message(0, 0, false).swap(message(1, 0, false));
    stages_[1]->forward(0, {x}, {}, results_);
    const auto output = results_.outputs.front().value.storage().getWeakStorageImpl();
    results_.outputs.clear();
    if (is_forgotten) {
      const std::string error = testing::error_of([&] { stages_[0]->check_done(); });
      EXPECT_NE(error.find("stage 0 keeps microbatch 0 after the step"), std::string::npos)
          << error;
      for (const auto& stage : stages_) stage->forget_microbatches();
    } else {
      stages_[1]->backward({Action::Kind::kBackward, 1, 0}, nullptr);
      message(1, 0, true).swap(message(0, 0, true));
      stages_[0]->backward({Action::Kind::kBackward, 0, 0}, nullptr);
    }
    for (const auto& stage : stages_) stage->check_done();
    EXPECT_EQ(x.use_count(), 1u) << is_forgotten;
    EXPECT_TRUE(sent.expired()) << is_forgotten;
    EXPECT_TRUE(output.expired()) << is_forgotten;
  }
}

TEST_F(StageTest, AfterAnErrorInAnOperatorAStageRunsAgain) {
  const at::Tensor wrong = at::ones({3});
  EXPECT_THROW(forward(0, wrong), c10::Error);
  for (const auto& stage : stages_) stage->forget_microbatches();
  EXPECT_EQ(wrong.use_count(), 1u);
  forward(0, x_);
  EXPECT_TRUE(at::equal(results_.outputs.front().value, loss(x_).detach()));
}

// A record has the gradients that plain libtorch computes, and a stage of its own gets them again.
TEST_F(StageTest, ARecordedMicrobatchRunsAgainWithTheSameHashes) {
  StageRecord record;
  record.keeps_given = true;
  stages_[1]->state(0).record = &record;
  forward(0, x_);
  EXPECT_TRUE(stages_[1]->backward({Action::Kind::kBackward, 1, 0}, nullptr).empty());
  ASSERT_EQ(record.given.size(), 2u) << "a parameter and a boundary value";
  Stage other(*partitioned_, 1, /*microbatches=*/1, table_);
  StageRecord again;
  other.run_again(record.given, {}, again);
  ASSERT_EQ(again.hashes.size(), record.hashes.size());
  for (size_t i = 0; i < record.hashes.size(); ++i) {
    EXPECT_TRUE(again.hashes[i].is_of(record.hashes[i]));
    EXPECT_EQ(again.hashes[i].hash, record.hashes[i].hash);
  }
}

}  // namespace
}  // namespace smp::pipeline
