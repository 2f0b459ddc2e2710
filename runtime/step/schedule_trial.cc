// SPDX-License-Identifier: Apache-2.0
#include "runtime/step/schedule_trial.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "partitioner/format.h"
#include "pipeline/measured_costs.h"
#include "pipeline/simulator.h"

namespace smp::runtime {
namespace {

using pipeline::RankedSchedule;
using pipeline::ScheduleRanking;
using pipeline::StepTimeline;
using pipeline::Timeline;

double typical_step(const Timeline& recorded) {
  std::vector<double> steps;
  for (const StepTimeline& step : recorded.measured) steps.push_back(step.makespan);
  return pipeline::median(steps);
}

/// The recorded step of middle length alone, and the prediction.
Timeline typical(Timeline recorded) {
  const double length = typical_step(recorded);
  auto& steps = recorded.measured;
  const auto found = std::find_if(steps.begin(), steps.end(), [&](const StepTimeline& step) {
    return step.makespan == length;
  });
  steps = {*found};
  return recorded;
}

}  // namespace

ScheduleTrial::ScheduleTrial(pipeline::ScheduleOptions options, RankedSchedule predicted)
    : options_(std::move(options)), first_(predicted), current_(std::move(predicted)) {}

void ScheduleTrial::learn(Timeline recorded) {
  recorded.predicted = pipeline::predicted_timeline(current_.simulation);
  recorded_.push_back(std::move(recorded));
  switch (part_) {
    case Part::kPredicted:
      part_ = Part::kExchanged;
      return exchange();
    case Part::kExchanged:
      part_ = Part::kChosen;
      return choose();
    default:
      part_ = Part::kOver;
      return settle();
  }
}

void ScheduleTrial::exchange() {
  current_.name += " with its backwards exchanged";
  current_.schedule = pipeline::exchange_backwards(first_.schedule, options_);
  current_.simulation = pipeline::simulate(current_.schedule, options_.edges(), options_.costs());
}

void ScheduleTrial::choose() {
  const auto costs = pipeline::measured_costs(recorded_, options_.edges(), options_.costs());
  options_.costs(costs);
  ranking_ = pipeline::rank_schedules(options_);
  current_ = {first_.name, first_.schedule,
              pipeline::simulate(first_.schedule, options_.edges(), costs)};
  const double gain = 1 - ranking_.best().simulation.makespan / current_.simulation.makespan;
  if (gain > ScheduleRanking::kAlike) current_ = ranking_.choice();
}

void ScheduleTrial::settle() {
  const auto in_quotes = [](const std::string& name) { return c10::str("\"", name, "\""); };
  const std::string before = in_quotes(first_.name);
  if (current_.schedule == first_.schedule) {
    verdict_ = c10::str("\"pipeline\": \"auto\" stays with ", before,
                        ": by these costs no schedule is faster by more than ",
                        100 * ScheduleRanking::kAlike, " %.");
    return;
  }
  const std::string now =
      in_quotes(current_.name) + (current_.name == first_.name ? " made anew" : "");
  const double tried = typical_step(recorded_.back()), first = typical_step(recorded_.front());
  const auto times = c10::str("a step takes ", partitioner::format_time(tried), " with it and ",
                              partitioner::format_time(first), " with ", before);
  if (first < (1 - ScheduleRanking::kAlike) * tried) {
    verdict_ = c10::str("\"pipeline\": \"auto\" tried ", now, " and returns to ", before, ": ",
                        times, ".");
    current_ = first_;
    return;
  }
  verdict_ =
      c10::str("\"pipeline\": \"auto\" changes from ", before, " to ", now, ": ", times, ".");
}

std::string ScheduleTrial::report() const {
  return c10::str("Schedules by measured costs (us):\n", pipeline::to_string(ranking_), verdict_,
                  "\n", pipeline::to_string(typical(recorded_.back())));
}

}  // namespace smp::runtime
