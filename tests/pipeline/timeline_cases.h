// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/simulator.h"
#include "pipeline/timeline.h"
#include "tests/pipeline/schedule_helpers.h"

/// A step of two ranks whose times are known, and the common part of tests of its record and its
/// pictures.
namespace smp::pipeline {

constexpr int64_t kOrigin = 1'000'000'000;

inline Schedule two_ranks() {
  return from_lines(
      {"0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE"},
      /*microbatches=*/1);
}

using Times = std::vector<std::pair<int64_t, int64_t>>;

/// Times of `two_ranks`, in ns: 8500 in all, of which rank 0 waits 4800 and rank 1 1500, and then
/// nothing.
inline const std::vector<Times> kTimes = {
    {{0, 1000}, {1000, 1200}, {1200, 6000}, {6000, 8000}, {8000, 8500}},
    {{0, 1500}, {1500, 2500}, {2500, 5000}, {5000, 5500}, {5500, 5500}},
};

/// The records of rank `rank` in one step after another that takes 20 us each.
inline RankTimeline recorded(int rank, int steps = 1, int replica = 0) {
  const Times& times = kTimes[rank];
  TimelineRecorder recorder(replica, rank, static_cast<int64_t>(times.size()), steps);
  for (size_t i = 0; i < times.size(); ++i) {
    if (two_ranks().actions(rank)[i].is_transfer()) recorder.set_bytes(i, 4096);
  }
  std::vector<TimedAction> kept(times.size());
  kept[0].memory = 2048;
  recorder.set_kept(kept);
  for (int step = 0; step < steps; ++step) {
    recorder.begin_step(step + 7);
    for (size_t i = 0; i < times.size(); ++i) {
      const int64_t begin = kOrigin + step * 20'000;
      recorder.record(i, begin + times[i].first, begin + times[i].second);
    }
  }
  return recorder.finish();
}

inline Timeline measured(int steps = 1, const Simulation* predicted = nullptr) {
  return make_timeline("two ranks", two_ranks(), {recorded(1, steps), recorded(0, steps)},
                       predicted);
}

inline Simulation simulated(const Schedule& schedule) {
  return simulate(schedule, chain_edges(schedule.stages()), StageCosts::uniform(schedule.stages()));
}

inline size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

/// Schedules of every shape: several stages, split backwards, no backward.
inline std::vector<Schedule> schedules() {
  return {lowered(simple, ScheduleOptions(3, 4)),
          lowered(zero_bubble_h1, ScheduleOptions(4, 6)),
          lowered(zero_bubble_v, ScheduleOptions::v_shaped(2, 4)),
          lowered(breadth_first, ScheduleOptions::looped(2, 3, 4)),
          lowered(forward_only, ScheduleOptions(2, 3)),
          two_ranks()};
}

}  // namespace smp::pipeline
