// SPDX-License-Identifier: Apache-2.0
// Runs the real tool on graphs that a program saved.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "graph/serialize.h"
#include "partitioner/best_order.h"
#include "partitioner/order.h"
#include "smp/smp.h"
#include "tests/command.h"
#include "tests/page_data.h"
#include "tests/smp/models.h"
#include "tests/temp_folder.h"
#include "tools/forecast.h"

namespace smp::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using smp::testing::Outcome;

std::string contents(const fs::path& path) {
  std::ifstream in(path);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

class SmpPlan : public ::testing::Test {
 protected:
  SmpPlan() { at::set_num_threads(1); }

  std::string path(const std::string& name) const { return folder_.file(name); }

  /// Trains a step on `ranks` ranks, which saves the graph.
  std::string save_graph(int ranks) const {
    const std::string file = path("gpt.json");
    train(Config().partitions(ranks).microbatches(2).graph_file(file), ranks);
    return file;
  }

  /// Trains a step.
  static void train(const Config& config, int ranks) {
    // The default generator is shared by the rank threads, so draw before they start.
    torch::manual_seed(3);
    const auto batch = smp::testing::TinyGptImpl::batch(4);
    run_as_threads(ranks, config, [&] {
      smp::testing::TinyGpt net(/*tied=*/true);
      if (config.tensor_parallel_degree() > 1) set_tensor_parallelism(*net);
      DistributedModel model(net);
      auto train = step([&](torch::Tensor ids, torch::Tensor targets) {
        auto loss = net->loss(ids, targets);
        model->backward(loss);
        return loss;
      });
      train(batch[0], batch[1]);
    });
  }

  static Outcome run(const std::string& arguments) {
    return smp::testing::run_command("tools/smp_plan " + arguments + " 2>&1");
  }

  static json run_json(const std::string& arguments) {
    const Outcome outcome = run(arguments + " --format json");
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    return json::parse(outcome.output);
  }

  const smp::testing::TempFolder folder_;
};

TEST_F(SmpPlan, DrawsASchedule) {
  const Outcome drawn = run("--schedule zb_h1 --stages 3 --microbatches 4");
  EXPECT_EQ(drawn.status, 0);
  EXPECT_EQ(drawn.output.find("zb_h1, 3 ranks, 4 microbatches\n\nrank 0 F0"), 0u) << drawn.output;
}

TEST_F(SmpPlan, ARunSavesItsGraphWithCosts) {
  const graph::Graph one = graph::load_graph(save_graph(1)).graph;
  EXPECT_TRUE(one.trains());
  double us = 0;
  for (const auto& op : one.operators) us += op.cost.forward_us + op.cost.backward_us;
  EXPECT_GT(us, 0);
  // The ranks of a pipeline save the same as a single one, but for the times.
  const graph::Graph two = graph::load_graph(save_graph(2)).graph;
  EXPECT_EQ(two.to_string(), one.to_string());
}

TEST_F(SmpPlan, PlansAsTheLibraryDoes) {
  const std::string file = save_graph(1);
  const graph::Graph graph = graph::load_graph(file).graph;
  for (const std::string pipeline : {"simple", "interleaved"}) {
    const auto config =
        Config().partitions(3).microbatches(8).pipeline(pipeline).memory_weight(0.2);
    const auto options =
        runtime::partition_options(config, 3, runtime::step_model(config, 3, 8, /*replicas=*/1));
    const auto plan = partitioner::partition_in_best_order(graph, options);
    const Forecast expected =
        forecast(config, "", partitioner::reordered(graph, plan.order), plan, 3, options.step());
    const json got =
        run_json(file + " --stages 3 --microbatches 8 --memory-weight 0.2 --pipeline " + pipeline);
    EXPECT_EQ(got["schedule"], pipeline);
    EXPECT_DOUBLE_EQ(got["step_us"], expected.simulation.makespan);
    EXPECT_DOUBLE_EQ(got["idle_share"], expected.simulation.bubble());
    int64_t operators = 0;
    for (int s = 0; s < 3; ++s) {
      const json& stage = got["stages"][s];
      const auto& predicted = expected.prediction.stages[s];
      operators += stage["operators"].get<int64_t>();
      // The simulated times are those that the partitioner predicts.
      EXPECT_NEAR(stage["forward_us"].get<double>() + stage["backward_us"].get<double>(),
                  predicted.time_us(), 1e-6);
      EXPECT_EQ(stage["in_flight"], predicted.in_flight);
      EXPECT_EQ(stage["memory"]["total"], predicted.memory());
    }
    EXPECT_EQ(operators, static_cast<int64_t>(graph.operators.size()));
    EXPECT_EQ(got["cuts"]["chosen"].size(), 2u);
  }
}

/// The graph's file tells the optimizer's state of the run; an option comes first.
TEST_F(SmpPlan, KnowsTheOptimizerOfTheRun) {
  const std::string file = path("sgd.json");
  torch::manual_seed(3);
  const auto x = torch::randn({4, 8});
  run_as_threads(1, Config().microbatches(2).graph_file(file), [&] {
    DistributedModel<torch::nn::Linear> model(torch::nn::Linear(8, 4));
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(),
                                                      torch::optim::SGDOptions(0.1).momentum(0.9));
    auto train = step([&](torch::Tensor input) {
      const auto loss = model(input).square().mean();
      model->backward(loss);
      return loss;
    });
    train(x);
  });
  constexpr int kBytes = (8 * 4 + 4) * 4;
  const auto optimizer_bytes = [](const json& plan) -> int64_t {
    return plan["stages"][0]["memory"]["optimizer"];
  };
  EXPECT_EQ(optimizer_bytes(run_json(file + " --stages 1")), kBytes);
  EXPECT_EQ(optimizer_bytes(run_json(file + " --stages 1 --optimizer-state 3")), 3 * kBytes);
  const Outcome text = run(file + " --stages 1");
  EXPECT_NE(text.output.find("optimizer state of 1 bytes for each byte trained"), std::string::npos)
      << text.output;
}

/// Ranks that divide layers save and plan the graph that one of them runs: on parts of parameters,
/// with operators that communicate.
TEST_F(SmpPlan, PlansDividedLayers) {
  const std::string file = path("divided.json"), plan = path("plan.json"), run = path("run.json");
  const auto config =
      Config().partitions(2).tensor_parallel_degree(2).ddp(true).microbatches(2).timeout_seconds(
          60);
  train(Config(config).graph_file(file), 4);
  const graph::Graph graph = graph::load_graph(file).graph;
  EXPECT_NE(graph.to_string().find("smp::tp_"), std::string::npos) << graph.to_string();
  std::ofstream(run) << config.to_json();
  const json planned = run_json(file + " --config " + run + " --save-plan " + plan);
  EXPECT_EQ(planned["microbatches"], 4);  // those of both ranks of a group
  EXPECT_EQ(planned["operators"], graph.operators.size());
  train(Config(config).partition_file(plan).load_partition(true), 4);
  try {
    train(Config().partitions(2).microbatches(2).partition_file(plan).load_partition(true), 2);
    ADD_FAILURE() << "a plan of another division was loaded";
  } catch (const PartitionError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("the plan was made for another graph"), std::string::npos) << text;
  }
}

TEST_F(SmpPlan, TiedParametersAndEdges) {
  const json plan = run_json(save_graph(1) + " --stages 2 --microbatches 4");
  ASSERT_EQ(plan["shared"].size(), 1u);
  EXPECT_EQ(plan["shared"][0]["name"], "head");
  EXPECT_EQ(plan["shared"][0]["owner"], 0);
  EXPECT_EQ(plan["shared"][0]["stage"], 1);
  EXPECT_EQ(plan["shared"][0]["bytes"], 17 * 16 * 4);
  ASSERT_EQ(plan["edges"].size(), 1u);
  int64_t bytes = plan["edges"][0]["forward_bytes"].get<int64_t>();
  EXPECT_GT(bytes, 0);
  bytes += plan["edges"][0]["backward_bytes"].get<int64_t>();
  EXPECT_EQ(plan["traffic_bytes"], 4 * bytes);
}

TEST_F(SmpPlan, Text) {
  const std::string file = save_graph(1);
  const Outcome plan = run(file + " --stages 2 --microbatches 4");
  EXPECT_EQ(plan.status, 0);
  for (const char* expected :
       {"Partition assignments: 2 stages, ", ", 4 microbatches\n", "Time and memory\n",
        "Edges between stages\n", "\nCuts: ", "  0|1  after operator ",
        "Predicted step: ", " (interleaved, 4 microbatches), ", "% of the partitions' time idle\n",
        "tied      head (1.1 KiB) belongs to stage 0, read by stage 1"}) {
    EXPECT_NE(plan.output.find(expected), std::string::npos) << expected << "\n" << plan.output;
  }
  // The output may go to a file instead.
  EXPECT_EQ(run(file + " --stages 2 --microbatches 4 --output " + path("plan.txt")).output, "");
  EXPECT_EQ(contents(path("plan.txt")), plan.output);
}

TEST_F(SmpPlan, ComparesNumbersOfStages) {
  const std::string file = save_graph(1);
  const Outcome text = run(file + " --microbatches 8 --compare 1,2,500");
  EXPECT_EQ(text.status, 0);
  for (const char* column : {"  partitions ", " step ", " speedup* ", " idle ", " memory** "}) {
    EXPECT_NE(text.output.find(column), std::string::npos) << text.output;
  }
  EXPECT_NE(text.output.find("  500 partitions: [smp] cannot divide "), std::string::npos)
      << text.output;
  const json all = run_json(file + " --microbatches 8 --compare 1,2,500");
  ASSERT_EQ(all.size(), 3u);
  EXPECT_DOUBLE_EQ(all[1]["step_us"], run_json(file + " --microbatches 8 --stages 2")["step_us"]);
  EXPECT_EQ(all[2]["partitions"], 500);
  EXPECT_EQ(all[2]["problem"].get<std::string>().find("[smp] cannot divide "), 0u);
}

TEST_F(SmpPlan, ParametersComeFromAFileAndTheCommandLine) {
  const std::string file = save_graph(1);
  std::ofstream(path("smp.json"))
      << R"({"partitions": 2, "microbatches": 6, "pipeline": "simple", "ddp": true})";
  const json plan = run_json(file + " --config " + path("smp.json") + " --stages 3");
  EXPECT_EQ(plan["partitions"], 3);
  EXPECT_EQ(plan["microbatches"], 6);
  EXPECT_EQ(plan["schedule"], "simple");
  EXPECT_EQ(plan["active_microbatches"], 5);
}

TEST_F(SmpPlan, Page) {
  const std::string file = save_graph(1);
  const Outcome page = run(file + " --stages 3 --microbatches 4 --format html --title 'a<b'");
  EXPECT_EQ(page.status, 0);
  EXPECT_EQ(page.output.find("<!DOCTYPE html>\n"), 0u);
  EXPECT_NE(page.output.find("<title>a&lt;b</title>\n<style>"), std::string::npos);
  EXPECT_EQ(page.output.find("src="), std::string::npos) << "needs nothing else";
  const json plan = run_json(file + " --stages 3 --microbatches 4");
  const json data = testing::data_in(page.output);
  EXPECT_EQ(data.at("title"), "a<b");
  EXPECT_EQ(data.at("step_us"), plan.at("step_us"));
  ASSERT_EQ(data.at("stages").size(), 3u);
  int operators = 0;
  for (const json& box : data.at("boxes")) operators += box.at("operators").get<int>();
  EXPECT_EQ(operators, plan.at("operators"));
  for (size_t s = 0; s < 3; ++s) {
    EXPECT_EQ(data["stages"][s].at("rank"), plan["stages"][s].at("partition"));
    EXPECT_EQ(data["stages"][s].at("memory"), plan["stages"][s]["memory"].at("total"));
    // A forward and a backward of each microbatch, on one rank each.
    EXPECT_EQ(data.at("timeline")[s].size(), 2u * 4u);
  }
  std::vector<std::string> names;
  for (const json& box : data.at("boxes")) names.push_back(box.at("name"));
  EXPECT_NE(std::find(names.begin(), names.end(), "attention_in0"), names.end());
  ASSERT_FALSE(data.at("ties").empty());
  EXPECT_EQ(data["ties"][0].at("label"), "head 1.1 KiB");
}

TEST_F(SmpPlan, SavesThePlan) {
  const std::string file = save_graph(1);
  EXPECT_EQ(run(file + " --stages 2 --save-plan " + path("plan.json")).status, 0);
  const json plan = json::parse(contents(path("plan.json")));
  EXPECT_EQ(plan["stages"].size(), 2u);
}

/// A message on a link of 50 ms holds up both stages, there and back, in each of three
/// microbatches.
TEST_F(SmpPlan, TakesTheCostsOfAFile) {
  const std::string file = save_graph(1);
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(path(name)) << text;
    return path(name);
  };
  const auto step_us = [&](const std::string& costs) {
    const std::string config = write("config.json", R"({"cost_model": ")" + costs + R"("})");
    return run_json(file + " --stages 2 --microbatches 3 --config " + config)
        .at("step_us")
        .get<double>();
  };
  const std::string slow = write("costs.json", R"({"links": [{"message_us": 50000}]})");
  EXPECT_GT(step_us(slow), step_us("auto") + 3 * 50000);
  const std::string measured = write("config.json", R"({"cost_model": "measured"})");
  EXPECT_EQ(
      run(file + " --stages 2 --config " + measured).output,
      "[smp] smp_plan runs nothing, and \"cost_model\": \"measured\" asks it to measure. Give the "
      "file with what a run of the program measured: it logs the text\n");
}

TEST_F(SmpPlan, Errors) {
  EXPECT_EQ(run(path("none.json")).output,
            "[smp] " + path("none.json") +
                ": cannot read the saved graph: No such file or directory. Give the path of a JSON "
                "file.\n");
  EXPECT_EQ(run(path("none.json")).status, 2);
  const std::string file = save_graph(1);
  EXPECT_EQ(run(file + " --stages 0").output,
            "[smp] program: \"partitions\": The number of partitions must be a positive integer. "
            "(got 0)\n");
  const Outcome many = run(file + " --stages 500");
  EXPECT_EQ(many.status, 2);
  EXPECT_EQ(many.output.find("[smp] cannot divide "), 0u) << many.output;
  EXPECT_EQ(run(file + " --compare 1,2 --format html").output,
            "[smp] smp_plan: --compare has no page: expected --format text or json, got html.\n");
  const std::string either =
      "[smp] smp_plan: expected a graph to plan or a --schedule to draw, got ";
  EXPECT_EQ(run("").output, either + "neither.\n");
  EXPECT_EQ(run(file + " --schedule 1f1b").output, either + "both.\n");
  EXPECT_EQ(run(file + " --output no/such/file")
                .output.find("[smp] no/such/file: cannot be "
                             "written: No such file"),
            0u);
}

}  // namespace
}  // namespace smp::tools
