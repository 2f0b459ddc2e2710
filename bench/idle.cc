// SPDX-License-Identifier: Apache-2.0
// How long ranks are idle in a step, against the times of the schedule alone, given those of the
// actions: the costs of the runtime, and whether the simulator is right.
//
// usage: tools/smprun --np 2 bazel-bin/bench/idle --pipeline 1f1b [--model bench]
//
// Prints, for each rank, the part of the step that it is idle, median over the recorded steps:
// measured; replayed, the schedule in virtual time with the time that each single action took in
// this step; and simulated, with the median time of each kind of action on each stage, which knows
// nothing of actions that take longer than others of their kind.

#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "examples/gpt/gpt_model.h"
#include "pipeline/measured_costs.h"
#include "pipeline/simulator.h"
#include "pipeline/walk.h"
#include "runtime/runtime.h"
#include "runtime/step/pipeline_choice.h"
#include "smp/smp.h"

namespace {

using smp::pipeline::median;
using smp::pipeline::StageCosts;

struct Model {
  int64_t width, heads, sequence, batch, microbatches;
};

constexpr Model kSmall = {128, 4, 64, 32, 16};
constexpr Model kBench = {512, 8, 128, 16, 8};

/// The computes of one rank in one recorded step, in us.
struct RankStep {
  double begin = std::numeric_limits<double>::infinity(), end = 0, busy = 0;
};

/// The times in a trace of the first replica.
struct Recorded {
  std::map<std::pair<char, int>, std::vector<double>> times;  // times by kind and stage
  std::map<std::string, std::map<int, RankStep>> steps;       // steps by step and rank
  std::map<std::string, std::map<std::string, double>> took;  // times by step and action

  explicit Recorded(const std::string& file) {
    const auto trace = nlohmann::json::parse(std::ifstream(file));
    for (const auto& event : trace["traceEvents"]) {
      if (event["ph"] != "X" || event["pid"] != 0) continue;
      if (event["cat"] == "send") took[event["args"]["step"]][event["name"]] = event["dur"];
      if (event["cat"] != "forward" && event["cat"] != "backward") continue;
      add(event);
    }
  }

  double time(char kind, int stage) const {
    const auto found = times.find({kind, stage});
    return found == times.end() ? 0 : median(found->second);
  }

 private:
  void add(const nlohmann::json& event) {
    const double begin = event["ts"], time = event["dur"];
    const auto name = event["name"].get<std::string>();
    const char kind = name[name.find_first_of("FBIW")];
    times[{kind, event["args"]["stage"]}].push_back(time);
    took[event["args"]["step"]][name] = time;
    RankStep& step = steps[event["args"]["step"]][event["tid"]];
    step.begin = std::min(step.begin, begin);
    step.end = std::max(step.end, begin + time);
    step.busy += time;
  }
};

/// The share of the step that a rank is idle, by rank.
std::vector<double> measured_idle(const Recorded& recorded, int ranks, double& step_us) {
  std::vector<std::vector<double>> idle(ranks);
  std::vector<double> spans;
  for (const auto& [name, by_rank] : recorded.steps) {
    double begin = std::numeric_limits<double>::infinity(), end = 0;
    for (const auto& [rank, step] : by_rank) {
      begin = std::min(begin, step.begin);
      end = std::max(end, step.end);
    }
    spans.push_back(end - begin);
    for (const auto& [rank, step] : by_rank) {
      idle[rank].push_back(1 - step.busy / (end - begin));
    }
  }
  step_us = median(spans);
  std::vector<double> result;
  for (const auto& shares : idle) result.push_back(median(shares));
  return result;
}

/// The same of one step, if ranks waited for nothing but each other. `took`: each action's time.
std::vector<double> replayed_idle(const smp::pipeline::Schedule& schedule,
                                  const std::map<std::string, double>& took) {
  std::vector<double> clocks(schedule.ranks()), busy(schedule.ranks());
  std::map<std::string, double> arrivals;  // arrivals by receive
  const auto perform = [&](int rank, size_t, const smp::pipeline::Action& action) {
    const std::string name = to_string(action);
    if (action.is_recv()) clocks[rank] = std::max(clocks[rank], arrivals.at(name));
    const auto found = took.find(name);
    const double time = found == took.end() ? 0 : found->second;
    clocks[rank] += time;
    if (action.is_compute()) busy[rank] += time;
    if (action.is_send()) arrivals[to_string(counterpart(action))] = clocks[rank];
  };
  smp::pipeline::walk(schedule, schedule.microbatches(), perform);
  const double makespan = *std::max_element(clocks.begin(), clocks.end());
  for (double& time : busy) time = 1 - time / makespan;
  return busy;
}

/// The median over the recorded steps, by rank.
std::vector<double> replayed_idle(const smp::pipeline::Schedule& schedule,
                                  const Recorded& recorded) {
  std::vector<std::vector<double>> idle(schedule.ranks());
  for (const auto& [step, took] : recorded.took) {
    const auto shares = replayed_idle(schedule, took);
    for (size_t rank = 0; rank < shares.size(); ++rank) idle[rank].push_back(shares[rank]);
  }
  std::vector<double> result;
  for (const auto& shares : idle) result.push_back(median(shares));
  return result;
}

StageCosts costs_of(const Recorded& recorded, int stages) {
  StageCosts costs;
  for (int stage = 0; stage < stages; ++stage) {
    costs.forward.push_back(recorded.time('F', stage));
    costs.backward.push_back(recorded.time('B', stage));
    costs.backward_input.push_back(recorded.time('I', stage));
    costs.backward_weight.push_back(recorded.time('W', stage));
  }
  return costs;
}

void report(const std::string& file, int ranks, int microbatches) {
  const smp::runtime::Runtime& runtime = smp::runtime::Runtime::get();
  const auto& config = runtime.config();
  const auto planned = smp::runtime::plan_step(
      config, runtime.first_step.schedule, *runtime.first_step.graph, *runtime.first_step.plan,
      ranks, smp::runtime::step_model(config, ranks, microbatches, /*replicas=*/1), false);
  const Recorded recorded(file);
  double step_us = 0;
  const auto idle = measured_idle(recorded, ranks, step_us);
  const auto replayed = replayed_idle(planned.schedule, recorded);
  const auto simulated = smp::pipeline::simulate(planned.schedule, planned.options.edges(),
                                                 costs_of(recorded, planned.schedule.stages()));
  std::printf("%s: step %.1f ms measured, %.1f ms simulated\n", planned.name.c_str(), step_us / 1e3,
              simulated.makespan / 1e3);
  for (int rank = 0; rank < ranks; ++rank) {
    const double expected = simulated.idle[rank] / simulated.makespan;
    std::printf("rank %d: %.1f %% of the step idle, %.1f %% replayed (%+.1f), %.1f %% simulated\n",
                rank, 100 * idle[rank], 100 * replayed[rank], 100 * (idle[rank] - replayed[rank]),
                100 * expected);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string pipeline = "1f1b", name = "small";
  CLI::App app("Idle time of a schedule, measured and simulated");
  app.add_option("--pipeline", pipeline, "A schedule")->capture_default_str();
  app.add_option("--model", name)->check(CLI::IsMember({"small", "bench"}))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const Model& model = name == "small" ? kSmall : kBench;
  torch::set_num_threads(1);
  torch::manual_seed(1);
  // The launcher may have set the parameters of another run; these are the program's.
  const auto folder = std::filesystem::temp_directory_path() / "smp_idle";
  const std::string page = (folder / "step.html").string();
  std::filesystem::create_directories(folder);
  smp::init(smp::Config()
                .partitions(2)
                .microbatches(model.microbatches)
                .optimize("speed")
                .pipeline(pipeline)
                .timeline(page));
  gpt::GPT net(gpt::GPTOptions()
                   .layers(8)
                   .width(model.width)
                   .heads(model.heads)
                   .sequence(model.sequence)
                   .dropout(0));
  smp::DistributedModel<gpt::GPT> wrapped(net);
  auto train = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = gpt::next_byte_loss(wrapped(x), y);
    wrapped->backward(loss);
    return loss;
  });
  const auto x = torch::randint(gpt::kVocabulary, {model.batch, model.sequence});
  for (int step = 0; step < 8; ++step) train(x, x);
  if (smp::rank() == 0) {
    report((folder / "step.json").string(), smp::pp_size(), static_cast<int>(model.microbatches));
  }
  smp::shutdown();
  return 0;
}
