// SPDX-License-Identifier: Apache-2.0
#include "pipeline/order_timing.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

constexpr double kNotYet = -1;

}  // namespace

StageFlow::StageFlow(const ScheduleOptions& options)
    : microbatches_(options.microbatches()),
      rank_of_stage_(options.rank_of_stage()),
      stages_of_rank_(static_cast<size_t>(options.ranks())),
      costs_(options.costs()) {
  for (int stage = 0; stage < options.stages(); ++stage) {
    stages_of_rank_[static_cast<size_t>(rank_of(stage))].push_back(stage);
  }
  forward_.resize(rank_of_stage_.size());
  backward_.resize(rank_of_stage_.size());
  // In the order in which `lower` sends.
  std::vector<size_t> nearest_first(options.edges().size());
  std::iota(nearest_first.begin(), nearest_first.end(), 0);
  const auto distance = [&](size_t i) { return options.edges()[i].to - options.edges()[i].from; };
  std::sort(nearest_first.begin(), nearest_first.end(),
            [&](size_t a, size_t b) { return distance(a) < distance(b); });
  for (const size_t i : nearest_first) {
    const auto& edge = options.edges()[i];
    add(forward_, edge.from, edge.to, costs_.send[i], costs_.latency[i]);
    if (edge.needs_gradient) {
      add(backward_, edge.to, edge.from, costs_.send[i], costs_.backward_latency[i]);
    }
  }
}

void StageFlow::add(std::vector<Links>& direction, int from, int to, double send, double latency) {
  Links& source = direction[static_cast<size_t>(from)];
  source.targets.push_back(to);
  double delay = 0;
  if (rank_of(from) != rank_of(to)) {
    source.sending += send;
    delay = source.sending + latency;
  }
  direction[static_cast<size_t>(to)].sources.push_back({from, delay});
}

/// Weight gradients have no links.
const StageFlow::Links& StageFlow::links(const Action& compute) const {
  static const Links kNone;
  const auto stage = static_cast<size_t>(compute.stage);
  return compute.kind == Kind::kForward    ? forward_[stage]
         : compute.makes_input_gradients() ? backward_[stage]
                                           : kNone;
}

OrderTimer::OrderTimer(const StageFlow& flow)
    : flow_(flow), times_(static_cast<size_t>(flow.ranks())), is_awake_(times_.size(), false) {}

double OrderTimer::time(const ActionOrder& order) {
  forwards_.assign(flow_.size(), {kNotYet, 0});
  gradients_.assign(flow_.size(), {kNotYet, 0});
  clocks_.assign(times_.size(), 0);
  for (int rank = 0; rank < flow_.ranks(); ++rank) {
    times_[static_cast<size_t>(rank)].clear();
    wake(rank);
  }
  while (!awake_.empty()) {
    const int rank = awake_.back();
    awake_.pop_back();
    is_awake_[static_cast<size_t>(rank)] = false;
    advance(order, rank);
  }
  for (size_t rank = 0; rank < order.size(); ++rank) {
    if (times_[rank].size() < order[rank].size()) {
      return std::numeric_limits<double>::infinity();
    }
  }
  return *std::max_element(clocks_.begin(), clocks_.end());
}

void OrderTimer::wake(int rank) {
  if (!is_awake_[static_cast<size_t>(rank)]) {
    is_awake_[static_cast<size_t>(rank)] = true;
    awake_.push_back(rank);
  }
}

double OrderTimer::arrival(const Action& compute, const StageFlow::Source& source) const {
  const auto& made = made_by(compute);
  return made[flow_.index(source.stage, compute.microbatch)].end + source.delay;
}

bool OrderTimer::is_ready(const Action& compute) const {
  const auto& made = made_by(compute);
  for (const auto& source : flow_.sources(compute)) {
    if (made[flow_.index(source.stage, compute.microbatch)].end == kNotYet) {
      return false;
    }
  }
  return true;
}

void OrderTimer::advance(const ActionOrder& order, int rank) {
  const auto& actions = order[static_cast<size_t>(rank)];
  auto& times = times_[static_cast<size_t>(rank)];
  auto& clock = clocks_[static_cast<size_t>(rank)];
  while (times.size() < actions.size() && is_ready(actions[times.size()])) {
    const auto& action = actions[times.size()];
    double start = clock;
    for (const auto& source : flow_.sources(action)) {
      start = std::max(start, arrival(action, source));
    }
    const double end = start + flow_.duration(action);
    clock = end + flow_.sending(action);
    if (action.kind != Kind::kBackwardWeight) {
      auto& made = action.kind == Kind::kForward ? forwards_ : gradients_;
      made[flow_.index(action)] = {end, times.size()};
    }
    times.push_back({start, end});
    for (const int target : flow_.targets(action)) {
      wake(flow_.rank_of(target));
    }
  }
}

std::vector<OrderTimer::Neighbours> OrderTimer::critical_neighbours(
    const ActionOrder& order) const {
  const auto last = std::max_element(clocks_.begin(), clocks_.end());
  int rank = static_cast<int>(last - clocks_.begin());
  std::vector<Neighbours> result;
  size_t position = times_[static_cast<size_t>(rank)].size() - 1;
  for (;;) {
    const auto& action = order[static_cast<size_t>(rank)][position];
    const double start = times_[static_cast<size_t>(rank)][position].start;
    const auto& sources = flow_.sources(action);
    const auto cause = std::find_if(sources.begin(), sources.end(), [&](const auto& source) {
      return flow_.rank_of(source.stage) != rank && arrival(action, source) == start;
    });
    if (cause != sources.end()) {
      position = made_by(action)[flow_.index(cause->stage, action.microbatch)].position;
      rank = flow_.rank_of(cause->stage);
    } else if (position > 0) {
      result.push_back({rank, --position});
    } else {
      return result;
    }
  }
}

}  // namespace smp::pipeline
