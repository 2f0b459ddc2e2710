// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "pipeline/generators.h"
#include "pipeline/schedule.h"
#include "pipeline/simulator.h"
#include "pipeline/verifier.h"
#include "pipeline/walk.h"
#include "tests/error_of.h"

namespace smp::pipeline {

using Generator = Schedule (*)(const ScheduleOptions&);
using Lines = std::vector<std::string>;

using smp::testing::error_of;
using smp::testing::error_or_none;

inline std::string verify_error(const Schedule& schedule, const std::vector<StageEdge>& edges,
                                const VerifyOptions& options = {}) {
  return error_or_none([&] { verify(schedule, edges, options); });
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "expected \"" << part << "\" in:\n" << text;
}

inline std::vector<StageEdge> all_pairs(int stages) {
  std::vector<StageEdge> edges;
  for (int from = 0; from < stages; ++from) {
    for (int to = from + 1; to < stages; ++to) {
      edges.push_back({from, to});
    }
  }
  return edges;
}

/// The least credit without deadlock: how many messages a channel must be able to hold. 1 for the
/// generators' schedules of chains; skips may need more, but never more than the microbatches in
/// flight. Throws as `verify` does when no credit makes the schedule right.
inline int required_credit(const Schedule& schedule, const std::vector<StageEdge>& edges) {
  verify(schedule, edges, VerifyOptions().credit(schedule.microbatches()));
  return least_credit(schedule, 1);
}

/// The computes as `torch.distributed.pipelining` writes them.
inline std::string csv_of(const Schedule& schedule) {
  std::string text;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const char* separator = "";
    for (const auto& action : schedule.actions(rank)) {
      if (!action.is_compute()) continue;
      text += separator + to_string(action);
      separator = ",";
    }
    text += '\n';
  }
  return text;
}

inline Schedule lowered(Generator generator, const ScheduleOptions& options) {
  return lower(generator(options), options.edges());
}
inline Schedule lowered(const ScheduleKind& kind, const ScheduleOptions& options) {
  return lower(kind.generate(options), options.edges());
}

/// The time of each rank from its first action of compute to the end of its last.
inline std::vector<double> spans_of(const Simulation& simulation) {
  std::vector<double> spans;
  for (const auto& timeline : simulation.timeline) {
    const auto computes = [](const TimedAction& timed) { return timed.action.is_compute(); };
    const auto first = std::find_if(timeline.begin(), timeline.end(), computes);
    const auto last = std::find_if(timeline.rbegin(), timeline.rend(), computes);
    spans.push_back(first == timeline.end() ? 0 : last->end - first->start);
  }
  return spans;
}

/// One pipeline that a kind can be made for.
inline ScheduleOptions pipeline_for(const ScheduleKind& kind) {
  switch (kind.placement) {
    case Placement::kVShaped:
      return ScheduleOptions::v_shaped(2, 4);
    case Placement::kOnePerRank:
      return {3, 4};
    case Placement::kLooped:
      return ScheduleOptions::looped(2, 2, 4);
    default:
      return ScheduleOptions(4, 3).ranks(3).rank_of_stage({0, 1, 0, 2}).edges(all_pairs(4));
  }
}

/// The most microbatches of each stage at one time, from their forward to the action that `ends`
/// them.
inline std::vector<int> peak_in_flight(const Simulation& simulation, int stages,
                                       bool (Action::*ends)()
                                           const = &Action::makes_weight_gradients) {
  std::vector<int> now(static_cast<size_t>(stages), 0);
  std::vector<int> peak = now;
  for (const auto& timeline : simulation.timeline) {
    for (const auto& timed : timeline) {
      const auto stage = static_cast<size_t>(timed.action.stage);
      if (timed.action.kind == Action::Kind::kForward) {
        peak[stage] = std::max(peak[stage], ++now[stage]);
      }
      if ((timed.action.*ends)()) {
        --now[stage];
      }
    }
  }
  return peak;
}

/// A schedule with one stage for each rank, from the actions of each rank.
inline Schedule from_lines(const Lines& lines, int microbatches, bool backward = true) {
  std::string text = "schedule ranks=" + std::to_string(lines.size()) +
                     " microbatches=" + std::to_string(microbatches) +
                     " backward=" + (backward ? "yes" : "no") + " rank_of_stage=";
  for (size_t rank = 0; rank < lines.size(); ++rank) {
    text += (rank == 0 ? "" : ",") + std::to_string(rank);
  }
  for (size_t rank = 0; rank < lines.size(); ++rank) {
    text += "\nrank " + std::to_string(rank) + ": " + lines[rank];
  }
  return parse_schedule(text);
}

}  // namespace smp::pipeline
