// SPDX-License-Identifier: Apache-2.0
#include "pipeline/measured_costs.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "pipeline/simulator.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

/// Times of actions of one kind, by stage or edge.
class Samples {
 public:
  void add(size_t index, int replica, double us) { samples_[index][replica].push_back(us); }

  /// The slowest replica's median, if there is any.
  std::optional<double> typical(size_t index) const { return slowest(index, median); }
  /// The slowest replica's least.
  std::optional<double> least(size_t index) const {
    return slowest(index, [](const std::vector<double>& times) {
      return *std::min_element(times.begin(), times.end());
    });
  }

  /// Puts them where there are any.
  void replace(std::vector<double>& planned) const {
    for (size_t i = 0; i < planned.size(); ++i) planned[i] = typical(i).value_or(planned[i]);
  }

 private:
  template <class Reduce>
  std::optional<double> slowest(size_t index, const Reduce& reduce) const {
    const auto found = samples_.find(index);
    if (found == samples_.end()) return std::nullopt;
    double result = 0;
    for (const auto& [replica, times] : found->second) result = std::max(result, reduce(times));
    return result;
  }

  std::map<size_t, std::map<int, std::vector<double>>> samples_;  // samples by replica
};

class CostMeter {
 public:
  explicit CostMeter(const std::vector<StageEdge>& edges) : edges_(edges) {}

  void add(const StepTimeline& step) {
    for (const Lane& lane : step.lanes) {
      for (const TimedAction& timed : lane.actions) {
        const auto [action, start, end, kept] = timed;
        if (action.is_compute()) {
          computes_[action.kind].add(static_cast<size_t>(action.stage), lane.replica, end - start);
        }
      }
    }
    for (const Delivery& delivery : deliveries_of(step)) add(step, delivery);
  }

  StageCosts costs(StageCosts planned) {
    computes_[Kind::kForward].replace(planned.forward);
    computes_[Kind::kBackward].replace(planned.backward);
    computes_[Kind::kBackwardInput].replace(planned.backward_input);
    computes_[Kind::kBackwardWeight].replace(planned.backward_weight);
    sends_.replace(planned.send);
    for (size_t edge = 0; edge < edges_.size(); ++edge) {
      const double there = receives_[0].least(edge).value_or(0);
      const double back = receives_[1].least(edge).value_or(0);
      const auto from = static_cast<size_t>(edges_[edge].from);
      planned.forward[static_cast<size_t>(edges_[edge].to)] += there;
      planned.backward[from] += back;
      if (planned.can_split()) planned.backward_input[from] += back;
      planned.latency[edge] = std::max(0.0, waits_[0].typical(edge).value_or(0) - there);
      planned.backward_latency[edge] = std::max(0.0, waits_[1].typical(edge).value_or(0) - back);
    }
    return planned;
  }

 private:
  void add(const StepTimeline& step, const Delivery& delivery) {
    const Lane& lane = step.lanes[delivery.from_lane];
    const TimedAction& send = lane.actions[delivery.send];
    const TimedAction& receive = step.lanes[delivery.to_lane].actions[delivery.receive];
    const size_t edge = edge_of(send.action, edges_);
    const bool back = send.action.is_backward();
    sends_.add(edge, lane.replica, send.end - send.start);
    if (receive.start >= send.end) {
      receives_[back].add(edge, lane.replica, receive.end - receive.start);
    } else {
      waits_[back].add(edge, lane.replica, receive.end - send.end);
    }
  }

  const std::vector<StageEdge>& edges_;
  std::map<Kind, Samples> computes_;
  Samples sends_;
  // There and back:
  Samples receives_[2];  // messages sent before; the shortest did not wait at all
  Samples waits_[2];     // for the others, from the end of their send on
};

/// Gives ranks that would keep more than they may the computes of `schedule` again.
void keep_where_too_large(const Schedule& schedule, const ScheduleOptions& options,
                          Schedule& exchanged) {
  const auto peaks =
      simulate(lower(exchanged, options.edges()), options.edges(), options.costs()).peak_memory;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto index = static_cast<size_t>(rank);
    if (peaks[index] <= options.memory_limit()[index] * (1 + kRounding)) continue;
    exchanged.actions(rank).clear();
    for (const Action& action : schedule.actions(rank)) {
      if (action.is_compute()) exchanged.actions(rank).push_back(action);
    }
  }
}

}  // namespace

Schedule exchange_backwards(const Schedule& schedule, const ScheduleOptions& options) {
  Schedule order = schedule.without_actions();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    auto& actions = order.actions(rank);
    for (const Action& action : schedule.actions(rank)) {
      const int stage = action.stage, microbatch = action.microbatch;
      if (action.kind == Kind::kForward) {
        actions.push_back(action);
      } else if (action.kind == Kind::kBackward) {
        actions.push_back(backward_input_of(stage, microbatch));
        actions.push_back(backward_weight_of(stage, microbatch));
      } else if (action.kind == Kind::kBackwardInput) {
        actions.push_back(backward_of(stage, microbatch));
      }
    }
  }
  if (!options.memory_limit().empty()) keep_where_too_large(schedule, options, order);
  return lower(order, options.edges());
}

StageCosts measured_costs(const std::vector<Timeline>& recorded,
                          const std::vector<StageEdge>& edges, const StageCosts& planned) {
  CostMeter meter(edges);
  for (const Timeline& timeline : recorded) {
    for (const StepTimeline& step : timeline.measured) meter.add(step);
  }
  return meter.costs(planned.filled(planned.forward.size(), edges.size()));
}

double median(std::vector<double> numbers) {
  const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

}  // namespace smp::pipeline
