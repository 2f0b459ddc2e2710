// SPDX-License-Identifier: Apache-2.0
#include "pipeline/unsharding.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "core/check.h"

namespace smp::pipeline {
namespace {

/// Computes of one stage, for which it stays unsharded.
struct Span {
  int stage = 0;
  size_t first = 0, last = 0;  // positions of computes in the rank's list
  int64_t elements = 0;        // that they read
};

std::vector<Span> find_spans(const std::vector<Action>& actions,
                             const std::vector<StageReads>& reads) {
  std::vector<Span> spans;
  for (size_t i = 0; i < actions.size(); ++i) {
    const Action& action = actions[i];
    if (!action.is_compute()) continue;
    const int64_t elements = reads.at(static_cast<size_t>(action.stage)).of(action);
    if (elements == 0) continue;
    if (spans.empty() || spans.back().stage != action.stage) {
      spans.push_back({action.stage, i, i, 0});
    }
    spans.back().last = i;
    // A backward reads nothing that the forward does not.
    spans.back().elements = std::max(spans.back().elements, elements);
  }
  return spans;
}

/// The position of the first receive of the compute at `position`, or its own.
size_t begin_of(const std::vector<Action>& actions, size_t position) {
  while (position > 0 && actions[position - 1].is_recv() &&
         actions[position - 1].stage == actions[position].stage) {
    --position;
  }
  return position;
}

/// The position behind the last send of the compute at `position`.
size_t end_of(const std::vector<Action>& actions, size_t position) {
  size_t end = position + 1;
  while (end < actions.size() && actions[end].is_send() &&
         actions[end].stage == actions[position].stage) {
    ++end;
  }
  return end;
}

std::vector<Action> unsharding_list(const std::vector<Action>& actions,
                                    const std::vector<StageReads>& reads, int64_t most) {
  const std::vector<Span> spans = find_spans(actions, reads);
  // Before the action at a position, those that free before those that gather.
  std::multimap<size_t, Action> added;
  for (const Span& span : spans) {
    added.emplace(end_of(actions, span.last), reshard_of(span.stage));
  }
  for (size_t i = 0; i < spans.size(); ++i) {
    const bool is_ahead = i > 0 && spans[i - 1].elements + spans[i].elements <= most;
    const size_t position = i == 0     ? begin_of(actions, spans[i].first)
                            : is_ahead ? begin_of(actions, spans[i - 1].last)
                                       : end_of(actions, spans[i - 1].last);
    added.emplace(position, unshard_of(spans[i].stage));
  }
  return inserted(actions, added);
}

/// The elements that the unshard at `position` gathers: those read until the stage is freed.
int64_t gathered_at(const std::vector<Action>& actions, size_t position, const StageReads& reads) {
  int64_t elements = 0;
  for (size_t i = position; i < actions.size(); ++i) {
    if (actions[i].stage != actions[position].stage) continue;
    if (actions[i].kind == Action::Kind::kReshard) break;
    if (actions[i].is_compute()) elements = std::max(elements, reads.of(actions[i]));
  }
  return elements;
}

}  // namespace

Schedule order_of_units(const Schedule& schedule, const std::vector<int>& stage_of_unit,
                        const std::vector<bool>& backward_of_unit) {
  std::vector<int> rank_of_unit;
  std::vector<std::vector<int>> units(static_cast<size_t>(schedule.stages()));
  for (size_t unit = 0; unit < stage_of_unit.size(); ++unit) {
    rank_of_unit.push_back(schedule.rank_of(stage_of_unit[unit]));
    units.at(static_cast<size_t>(stage_of_unit[unit])).push_back(static_cast<int>(unit));
  }
  Schedule result(schedule.ranks(), schedule.microbatches(), std::move(rank_of_unit),
                  backward_of_unit);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (Action action : schedule.actions(rank)) {
      if (!action.is_compute()) continue;
      auto of_stage = units[static_cast<size_t>(action.stage)];
      if (action.is_backward()) std::reverse(of_stage.begin(), of_stage.end());
      for (const int unit : of_stage) {
        if (action.is_backward() && !result.has_backward(unit)) continue;
        action.stage = unit;
        result.actions(rank).push_back(action);
      }
    }
  }
  return result;
}

Schedule with_unsharding(const Schedule& lowered, const std::vector<StageReads>& reads,
                         int64_t most) {
  Schedule result = lowered;
  for (auto& actions : result.lists()) actions = unsharding_list(actions, reads, most);
  verify_unsharding(result, reads, most);
  return result;
}

void verify_unsharding(const Schedule& schedule, const std::vector<StageReads>& reads,
                       int64_t most) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::map<int, int64_t> unsharded;  // elements by stage
    const auto& actions = schedule.actions(rank);
    for (size_t i = 0; i < actions.size(); ++i) {
      const Action& action = actions[i];
      const auto at = [&] { return schedule.at(rank, i); };
      const StageReads& of_stage = reads.at(static_cast<size_t>(action.stage));
      if (action.kind == Action::Kind::kUnshard) {
        const bool is_new =
            unsharded.emplace(action.stage, gathered_at(actions, i, of_stage)).second;
        SMP_CHECK(is_new, at(), "the stage is unsharded already.");
      } else if (action.kind == Action::Kind::kReshard) {
        SMP_CHECK(unsharded.erase(action.stage) == 1, at(), "the stage is not unsharded.");
      } else if (action.is_compute() && of_stage.of(action) > 0) {
        SMP_CHECK(unsharded.count(action.stage) > 0, at(),
                  "it reads divided parameters, and its stage is not unsharded.");
      }
      int64_t live = 0;
      for (const auto& [stage, elements] : unsharded) live += elements;
      SMP_CHECK(unsharded.size() == 1 || live <= most, at(), "the rank has ", live,
                " elements of divided parameters, ", most, " are allowed.");
    }
    SMP_CHECK(unsharded.empty(), "schedule: rank ", rank, " ends with stage ",
              unsharded.begin()->first, " unsharded.");
  }
}

}  // namespace smp::pipeline
