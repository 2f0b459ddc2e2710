// SPDX-License-Identifier: Apache-2.0
#include "partitioner/plan_file.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "partitioner/complete.h"
#include "partitioner/predict.h"
#include "tests/error_of.h"
#include "tests/partitioner/graph_builder.h"

namespace smp::partitioner::testing {
namespace {

using smp::testing::error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// "fc0" and "fc1", each a matmul and a relu; then a mean.
GraphBuilder two_layers(int64_t batch = 2, bool second_relu = true) {
  GraphBuilder b;
  Ref x = b.input(at::ones({batch, 4}));
  for (const char* name : {"fc0", "fc1"}) {
    const Ref weight = b.parameter(std::string(name) + ".weight", at::ones({4, 4}));
    b.scope = name;
    x = b.op("aten::matmul", {x, weight});
    b.cost(100, 200, 1000);
    x = b.op(second_relu || b.scope == "fc0" ? "aten::relu" : "aten::sin", {x});
    b.cost(10, 20, 100);
  }
  b.scope = "";
  x = b.op("aten::mean", {x, c10::IValue()});
  b.backward(x);
  b.output(x);
  return b;
}

Plan three_stages(const graph::Graph& graph) {
  return complete_plan(graph, {0, 1, 0}, {0, 0, 1, 1, 2}, {});
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

template <class E = PartitionError>
std::string load_error(const graph::Graph& graph, const std::string& text, int partitions = 2) {
  return error_of<E>([&] { plan_from_json(graph, text, partitions, "plan.json"); });
}

TEST(PlanFile, IsForPeople) {
  GraphBuilder b = two_layers();
  std::string text = plan_to_json(b.graph(), three_stages(b.graph()));
  const size_t fingerprint = text.find("\"fingerprint\": \"") + 16;
  text.replace(fingerprint, 16, "0123456789abcdef");
  EXPECT_EQ(text, R"json({
  "format": "smp partition",
  "version": 1,
  "graph": {
    "operators": 5,
    "fingerprint": "0123456789abcdef"
  },
  "partitions": 2,
  "stages": [
    {
      "partition": 0,
      "first": 0,
      "last": 1,
      "from": "aten::matmul in fc0",
      "to": "aten::relu in fc0",
      "modules": "fc0"
    },
    {
      "partition": 1,
      "first": 2,
      "last": 3,
      "from": "aten::matmul in fc1",
      "to": "aten::relu in fc1",
      "modules": "fc1"
    },
    {
      "partition": 0,
      "first": 4,
      "last": 4,
      "from": "aten::mean",
      "to": "aten::mean",
      "modules": "(step function)"
    }
  ],
  "owners": {
    "fc0.weight": 0,
    "fc1.weight": 1
  }
}
)json");
}

TEST(PlanFile, LoadsWhatWasSaved) {
  GraphBuilder b = two_layers();
  const Plan plan = three_stages(b.graph());
  const Plan loaded = plan_from_json(b.graph(), plan_to_json(b.graph(), plan), 2, "plan.json");
  EXPECT_EQ(loaded.to_string(), plan.to_string());
  EXPECT_EQ(loaded.reason_of_operator[0], "loaded from plan.json");
  GraphBuilder larger = two_layers(/*batch=*/8);
  EXPECT_THAT(plan_from_json(larger.graph(), plan_to_json(b.graph(), plan), 2, "plan.json")
                  .stage_of_operator,
              ElementsAre(0, 0, 1, 1, 2))
      << "another batch size does not matter";
}

TEST(PlanFile, EmptyStages) {
  GraphBuilder b = two_layers();
  const Plan plan = complete_plan(b.graph(), {0, 1, 2}, {0, 0, 2, 2, 2}, {});
  const Plan loaded = plan_from_json(b.graph(), plan_to_json(b.graph(), plan), 3, "plan.json");
  EXPECT_EQ(loaded.to_string(), plan.to_string());
}

TEST(PlanFile, OfAnotherGraph) {
  GraphBuilder b = two_layers();
  const std::string text = plan_to_json(b.graph(), three_stages(b.graph()));
  GraphBuilder other = two_layers(2, /*second_relu=*/false);
  const std::string error = load_error(other.graph(), text);
  EXPECT_THAT(error, HasSubstr("plan.json: the plan was made for another graph than that of this "
                               "step function (5 operators, fingerprint "));
  EXPECT_THAT(error, HasSubstr("stage 1 ends with operator 3, aten::relu in fc1, but operator 3 of "
                               "the graph is aten::sin in fc1. Delete the file or switch off "
                               "\"load_partition\" to partition anew."));
  other.graph().operators.pop_back();
  EXPECT_THAT(load_error(other.graph(), replaced(text, "aten::relu in fc1", "aten::sin in fc1")),
              HasSubstr("stage 2 ends at operator 4, the graph at 3"));
}

TEST(PlanFile, WithOtherPartitions) {
  GraphBuilder b = two_layers();
  const std::string text = plan_to_json(b.graph(), three_stages(b.graph()));
  EXPECT_EQ(load_error(b.graph(), text, 4),
            "[smp] plan.json: the plan is for 2 partitions, but the configuration asks for 4. Set "
            "\"partitions\" to 2, or switch off \"load_partition\" to partition anew.");
}

TEST(PlanFile, Malformed) {
  GraphBuilder b = two_layers();
  const std::string text = plan_to_json(b.graph(), three_stages(b.graph()));
  EXPECT_THAT(load_error<ConfigError>(b.graph(), "{"), HasSubstr("plan.json: malformed JSON at"));
  EXPECT_THAT(load_error<ConfigError>(b.graph(), replaced(text, "smp partition", "other")),
              HasSubstr("plan.json: \"format\": expected \"smp partition\", got \"other\""));
  EXPECT_THAT(
      load_error<ConfigError>(b.graph(), replaced(text, "\"version\": 1", "\"version\": 2")),
      HasSubstr("plan.json: \"version\": expected 1, got 2"));
  EXPECT_THAT(load_error<ConfigError>(b.graph(), replaced(text, "\"first\": 2", "\"first\": 3")),
              HasSubstr("plan.json: \"stages[1].first\": expected 2, the operator after the stage "
                        "before, got 3. Stages follow each other without a gap."));
  EXPECT_THAT(
      load_error<ConfigError>(b.graph(), replaced(text, "\"partition\": 1", "\"partition\": 5")),
      HasSubstr("\"stages[1].partition\": expected an integer from 0 to 1, got 5"));
  EXPECT_THAT(load_error(b.graph(), replaced(text, "\"partition\": 1", "\"partition\": 0")),
              HasSubstr("plan.json: expected a stage for each of the 2 partitions, got stages for "
                        "1"));
}

TEST(PlanFile, RefusesWhatNoPlanHas) {
  GraphBuilder b = two_layers();
  const std::string text = plan_to_json(b.graph(), three_stages(b.graph()));
  std::string stages;
  for (int i = 0; i < 4097; ++i) {
    stages += R"({"partition": 0, "first": 0, "last": -1}, )";
  }
  EXPECT_THAT(
      load_error<ConfigError>(b.graph(), replaced(text, "\"stages\": [", "\"stages\": [" + stages)),
      HasSubstr("plan.json: \"stages\": expected at most 4096 stages, got an array of 4100."));
  const std::string ranges = R"("first": 0,
      "last": 1)";
  EXPECT_THAT(
      load_error<ConfigError>(b.graph(), replaced(text, ranges, R"("operators": "0-4, 0-4")")),
      HasSubstr("\"stages[0].operators\": expected operators from 0 to 4 like \"0-3, 8, 9-12\""));
  EXPECT_THAT(load_error(b.graph(), replaced(text, "aten::matmul in fc0", R"(a\n\u001b[2J)")),
              HasSubstr("stage 0 begins with operator 0, a\\n\\x1b[2J, but operator 0"));
}

TEST(PlanFile, OfNamesThatAreNoUtf8) {
  GraphBuilder b = two_layers();
  b.graph().operators[0].scope = "\xff";
  EXPECT_THAT(error_of<PartitionError>([&] { plan_to_json(b.graph(), three_stages(b.graph())); }),
              HasSubstr("the plan cannot be written: expected names of modules and parameters in "
                        "UTF-8, got: "));
}

TEST(PlanFile, AnIllegalCut) {
  GraphBuilder b = written_by_a_view();
  const Plan plan = complete_plan(b.graph(), {0, 1}, {0, 0, 1}, {});
  EXPECT_THAT(load_error(b.graph(), plan_to_json(b.graph(), plan)),
              HasSubstr("plan.json: the plan cannot be used. plan: the cut between operators "
                        "1 and 2 is illegal: operator 2 (aten::relu_) writes the storage"));
}

// ---- Predictions -----------------------------------------------------------------------------

TEST(Predict, TimeAndMemoryByFormula) {
  GraphBuilder b = two_layers();
  const Plan plan = complete_plan(b.graph(), {0, 1}, {0, 0, 1, 1, 1}, {});
  const auto step = StepModel(8).active_microbatches(4);
  const Prediction got = predict(b.graph(), plan, step);
  // One tensor of 32 bytes forward and its gradient back, a message each way: half at each end.
  const double transfer = (5 + 32.0 / 3000) + 20;
  EXPECT_DOUBLE_EQ(got.rank_us[0], 330 + transfer);
  EXPECT_DOUBLE_EQ(got.rank_us[1], 330 + transfer);
  EXPECT_DOUBLE_EQ(got.step_us, 2 * (330 + transfer) + 7 * (330 + transfer));
  EXPECT_EQ(got.stages[0].in_flight, 3);
  EXPECT_EQ(got.stages[1].in_flight, 1);
  EXPECT_EQ(got.rank_memory[0], 64 * (1 + 1 + 2) + 3 * 1100);
  EXPECT_EQ(got.rank_memory[1], 64 * (1 + 1 + 2) + 1 * (1100 + 32));
  EXPECT_EQ(describe_memory(plan, got, 0),
            "3.5 KiB: weights 64 B, gradients 64 B, optimizer state 128 B, activations of 3 "
            "microbatches 3.2 KiB");
}

TEST(Predict, MessagesLieOnTheDeviceOfTheSender) {
  GraphBuilder b = two_layers();
  const Plan plan = complete_plan(b.graph(), {0, 1}, {0, 0, 1, 1, 1}, {});
  const auto step = StepModel(8).active_microbatches(4);
  const Prediction host = predict(b.graph(), plan, step);
  const Prediction got = predict(b.graph(), plan, StepModel(step).messages(3));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(host.stages[rank].messages, 0);
    EXPECT_EQ(got.stages[rank].messages, 3 * 32) << "a tensor of 32 bytes, and its gradient";
    EXPECT_EQ(got.rank_memory[rank], host.rank_memory[rank] + 3 * 32);
  }
  EXPECT_THAT(describe_memory(plan, got, 0), HasSubstr("KiB, messages under way 96 B"));
  const Prediction few = predict(b.graph(), plan, StepModel(2).messages(3));
  EXPECT_EQ(few.stages[0].messages, 2 * 32);
  const Plan one_rank = complete_plan(b.graph(), {0, 0}, {0, 0, 1, 1, 1}, {});
  EXPECT_EQ(predict(b.graph(), one_rank, StepModel(step).messages(3)).stages[0].messages, 0);
}

/// The plan of two products by one weight, a stage each.
Plan two_stages_of_a_tied_weight(GraphBuilder& b) {
  const Ref weight = b.parameter("tied", at::ones({4, 4}));
  Ref x = b.op("aten::matmul", {b.input(at::ones({2, 4})), weight});
  x = b.op("aten::matmul", {x, weight});
  b.backward(x);
  b.output(x);
  return complete_plan(b.graph(), {0, 1}, {0, 1}, {});
}

/// A replica's gradient goes to the owner of its parameter.
TEST(Predict, GradientsOfReplicasAreMessages) {
  GraphBuilder b;
  const Plan plan = two_stages_of_a_tied_weight(b);
  const Prediction got = predict(b.graph(), plan, StepModel(4).messages(3));
  EXPECT_EQ(got.stages[0].messages, 3 * 32);
  EXPECT_EQ(got.stages[1].messages, 3 * (32 + 64));
}

/// Each stage that reads a weight under autocast keeps one, for all its uses and microbatches.
TEST(Predict, CastsOfWeights) {
  GraphBuilder b;
  const Ref weight = b.parameter("tied", at::ones({128, 128}));
  const Ref own = b.parameter("own", at::ones({128, 256}));
  Ref x = b.input(at::ones({2, 128}));
  for (int i = 0; i < 3; ++i) x = b.op("aten::matmul", {x, weight});
  x = b.op("aten::matmul", {x, own});
  b.backward(x);
  b.output(x);
  const Plan plan = complete_plan(b.graph(), {0, 1}, {0, 0, 1, 1}, {});
  EXPECT_EQ(predict(b.graph(), plan, StepModel(4)).stages[1].casts, 0);
  for (graph::Operator& op : b.graph().operators) op.mode.autocast_cpu = true;
  const Prediction got = predict(b.graph(), plan, StepModel(4));
  EXPECT_EQ(got.stages[0].casts, 2 * 128 * 128);
  EXPECT_EQ(got.stages[1].casts, 2 * 128 * (128 + 256));
  EXPECT_EQ(got.rank_memory[1], got.stages[1].memory());
  EXPECT_THAT(describe_memory(plan, got, 1), HasSubstr("B, casts of weights 96.0 KiB"));
}

TEST(Predict, MicrobatchesInFlight) {
  const auto simple = StepModel(8).interleaved(false);
  const auto interleaved = StepModel(8).active_microbatches(6);
  const auto split = StepModel(8).active_microbatches(6).splits(true);
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_EQ(microbatches_in_flight(simple, true, stage, 4), 8);
    EXPECT_EQ(microbatches_in_flight(interleaved, true, stage, 4),
              (std::vector<int>{6, 5, 3, 1})[stage]);
    EXPECT_EQ(microbatches_in_flight(split, true, stage, 4), 6);
    EXPECT_EQ(microbatches_in_flight(interleaved, false, stage, 4), 0);
  }
}

TEST(Predict, TheStagesOfOneRankAddUpAndSendNothingToEachOther) {
  GraphBuilder b = two_layers();
  const Plan split = complete_plan(b.graph(), {0, 1}, {0, 0, 1, 1, 1}, {});
  const Plan both = complete_plan(b.graph(), {0, 0}, {0, 0, 1, 1, 1}, {});
  EXPECT_DOUBLE_EQ(predict(b.graph(), both, StepModel(8)).rank_us[0], 660);
  EXPECT_DOUBLE_EQ(predict(b.graph(), both, StepModel(8)).step_us, 8 * 660);
  EXPECT_LT(predict(b.graph(), split, StepModel(8)).step_us, 8 * 660);
}

TEST(Predict, ATiedWeightIsKeptTwiceButTrainedOnce) {
  GraphBuilder b;
  const Plan plan = two_stages_of_a_tied_weight(b);
  const Prediction got = predict(b.graph(), plan, StepModel(1));
  EXPECT_EQ(got.stages[0].weights, 64);
  EXPECT_EQ(got.stages[0].optimizer, 128);
  EXPECT_EQ(got.stages[1].replicas, 128) << "the weight and a gradient";
  EXPECT_EQ(got.stages[1].optimizer, 0);
}

/// Reads parameters of this many float32 elements, one after the other.
GraphBuilder product_of(const std::vector<int64_t>& elements) {
  GraphBuilder b;
  Ref x = b.input(at::ones({1}));
  for (size_t i = 0; i < elements.size(); ++i) {
    x = b.op("aten::mul.Tensor",
             {x, b.parameter("p" + std::to_string(i), at::ones({elements[i]}))});
    x = b.op("aten::sum", {x, c10::IValue()});
  }
  b.backward(x);
  b.output(x);
  return b;
}

Prediction predict_on_one_rank(GraphBuilder& b, const StepModel& step) {
  const std::vector<int> stages(b.graph().operators.size(), 0);
  return predict(b.graph(), complete_plan(b.graph(), {0}, stages, {}), step);
}

TEST(Predict, SumsOfReplicasHaveMemoryOfTheirOwn) {
  GraphBuilder b = product_of({100, 50});
  EXPECT_EQ(predict_on_one_rank(b, StepModel(4)).stages[0].gradients, 600) << "they become .grad";
  EXPECT_EQ(predict_on_one_rank(b, StepModel(4).replicas(2)).stages[0].gradients, 2 * 600);
  EXPECT_EQ(predict_on_one_rank(b, StepModel(4).shards(4)).stages[0].gradients, 2 * 600)
      << "the sum of those that are complete, and one more";
  EXPECT_EQ(predict_on_one_rank(b, StepModel(4).replicas(2).shards(2)).stages[0].gradients,
            3 * 600);
}

TEST(Predict, GradientsOfHalfPrecisionAreSummedInFloat32) {
  GraphBuilder b;
  const auto weight = b.parameter("weight", at::ones({100}, at::kBFloat16));
  const auto sum = b.op("aten::sum", {b.op("aten::mul.Tensor", {weight, weight}), c10::IValue()});
  b.backward(sum);
  b.output(sum);
  const auto on_replicas = StepModel(4).optimizer_state(2);
  const Prediction whole = predict_on_one_rank(b, on_replicas);
  EXPECT_EQ(whole.stages[0].weights, 200);
  EXPECT_EQ(whole.stages[0].gradients, 400);
  EXPECT_EQ(whole.stages[0].optimizer, 400) << "for each byte of a parameter: docs/precision.md";
  const auto divided =
      StepModel(4).replicas(4).sharding(ReplicaSharding().parameters(4).smallest(1));
  const Prediction parts = predict_on_one_rank(b, divided);
  EXPECT_EQ(parts.stages[0].gradients, 100 + 400) << "the shard's, and the sum";
  EXPECT_EQ(parts.gathered[0], 200) << "the whole";
  const Prediction shards = predict_on_one_rank(b, StepModel(divided).shards(2));
  EXPECT_EQ(shards.stages[0].gradients, 100 + 2 * 400) << "a sum of each gradient shard";
}

TEST(Predict, ReplicasDivideOptimizerStateAndReducedGradients) {
  GraphBuilder b = product_of({100, 50});
  const auto step =
      StepModel(4).optimizer_state(2).replicas(4).sharding(ReplicaSharding().states(4));
  const Prediction got = predict_on_one_rank(b, step);
  EXPECT_EQ(got.stages[0].weights, 600);
  EXPECT_EQ(got.stages[0].gradients, 600 + 150) << "the sums, and a part of what they give";
  EXPECT_EQ(got.stages[0].optimizer, 2 * 150);
  EXPECT_EQ(got.gathered[0], 0);
}

TEST(Predict, ReplicasDivideParametersThatAreLargeEnough) {
  GraphBuilder b = product_of({100, 10, 300});
  const auto sharding = ReplicaSharding().parameters(4).smallest(100);
  const Prediction several =
      predict_on_one_rank(b, StepModel(2).optimizer_state(2).replicas(4).sharding(sharding));
  EXPECT_EQ(several.stages[0].weights, 100 + 40 + 300);
  EXPECT_EQ(several.stages[0].gradients, 100 + 2 * 40 + 300 + 1600) << "sums of those divided";
  EXPECT_EQ(several.stages[0].optimizer, 2 * (100 + 40 + 300));
  EXPECT_EQ(several.gathered[0], 1600) << "both whole";
  EXPECT_EQ(several.buckets[0], 0);
  EXPECT_EQ(several.rank_memory[0], several.stages[0].memory() + several.gathered[0]);
}

TEST(Predict, WholeParametersAndTheirSumsHaveTheirLimits) {
  GraphBuilder b = product_of({10, 20, 30, 40, 50, 60});
  const auto working = [&](int microbatches, int64_t live, int64_t bucket) {
    const auto sharding = ReplicaSharding().parameters(2).live(live).bucket(bucket);
    const auto step = StepModel(microbatches).sharding(sharding);
    const Prediction got = predict_on_one_rank(b, step);
    const int64_t bytes = got.gathered[0] + got.buckets[0];
    EXPECT_EQ(got.rank_memory[0], got.stages[0].memory() + bytes);
    EXPECT_EQ(working_bytes(b.graph(), step), bytes);
    return bytes / 4;
  };
  const int64_t all = 210;
  EXPECT_EQ(working(2, 1000, 1000), all) << "10 to 40, and 50 and 60";
  EXPECT_EQ(working(2, 115, 1000), 50 + 60);
  EXPECT_EQ(working(2, 100, 1000), 100) << "as much as is allowed of two";
  EXPECT_EQ(working(2, 1, 1000), 60) << "units of one";
  EXPECT_EQ(working(1, 1000, 1000), all + all);
  EXPECT_EQ(working(1, 1, 70), 60 + 2 * 70);
  EXPECT_EQ(working(1, 1, 10), 60 + 2 * 60) << "the largest has a bucket for itself";
  EXPECT_EQ(working(1, 1, 210), 60 + all);
}

TEST(StepModel, RegionsGoWithTheirOperators) {
  EXPECT_THAT(StepModel().regions({0, 1, -1}).in_order({2, 0, 1}).regions(), ElementsAre(-1, 0, 1));
  EXPECT_THAT(StepModel().regions({0, 1}).in_order({}).regions(), ElementsAre(0, 1));
  EXPECT_THAT(StepModel().in_order({1, 0}).regions(), ElementsAre());
}

/// Each rank has its own: parameters of its stages, and sums of their gradients.
TEST(Predict, RanksOfAPipelineGatherTheirOwn) {
  GraphBuilder b = product_of({10, 20, 30, 40, 50, 60});
  std::vector<int> stages(b.graph().operators.size(), 0);
  std::fill(stages.begin() + 8, stages.end(), 1);
  const Plan plan = complete_plan(b.graph(), {0, 1}, stages, {});
  const auto step = [](int microbatches) {
    return StepModel(microbatches).sharding(ReplicaSharding().parameters(2));
  };
  const Prediction several = predict(b.graph(), plan, step(2)),
                   one = predict(b.graph(), plan, step(1));
  EXPECT_THAT(several.gathered, ElementsAre(4 * 100, 4 * 110));
  EXPECT_THAT(several.buckets, ElementsAre(0, 0));
  EXPECT_EQ(several.stages[0].gradients, 400 + 400 / 2);
  EXPECT_THAT(one.gathered, ElementsAre(4 * 100, 4 * 110));
  EXPECT_THAT(one.buckets, ElementsAre(4 * 100, 4 * 110));
  for (const Prediction& got : {several, one}) {
    EXPECT_EQ(describe_memory(plan, got, 0),
              "1.6 KiB: weights 200 B, gradients 600 B, optimizer state 400 B, activations of 1 "
              "microbatch -, divided parameters while they are whole 400 B");
  }
}

}  // namespace
}  // namespace smp::partitioner::testing
