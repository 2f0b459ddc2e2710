// SPDX-License-Identifier: Apache-2.0
#include "pipeline/frame.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "core/check.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

std::vector<Action> copies_on(int rank, const Schedule& schedule, const Frame& frame) {
  std::vector<Action> actions;
  for (const Frame::Copy& copy : frame.copies) {
    if (schedule.rank_of(copy.from) == rank) actions.push_back(send_copy(copy.from, copy.to));
    if (schedule.rank_of(copy.to) == rank) actions.push_back(recv_copy(copy.to, copy.from));
  }
  return actions;
}

/// Recalls by the position of the compute before which they stand.
std::multimap<size_t, Action> find_recalls(const std::vector<Action>& actions, int horizon) {
  std::multimap<size_t, Action> recalls;
  std::vector<size_t> computes;
  for (size_t i = 0; i < actions.size() && horizon > 0; ++i) {
    if (!actions[i].is_compute()) continue;
    computes.push_back(i);
    // The second half of a backward has the inputs of the first.
    if (!actions[i].makes_input_gradients()) continue;
    const size_t last = computes.size() - 1;
    recalls.emplace(computes[last - std::min(last, static_cast<size_t>(horizon))],
                    recall_of(actions[i].stage, actions[i].microbatch));
  }
  return recalls;
}

/// Checks the list of a rank on its own, and returns its outputs.
std::vector<int> check_list(const Schedule& schedule, int rank) {
  bool has_begun = false;
  std::pair<int, int> copied(-1, -1);
  std::set<std::pair<int, int>> recalled, gone_back;  // stage and microbatch
  std::vector<int> outputs;
  const auto& actions = schedule.actions(rank);
  for (size_t i = 0; i < actions.size(); ++i) {
    const Action& action = actions[i];
    const std::pair<int, int> microbatch(action.stage, action.microbatch);
    const auto at = [&] { return schedule.at(rank, i); };
    SMP_CHECK(outputs.empty() || action.kind == Kind::kOutputs, at(),
              "the outputs of a step are its last actions.");
    if (action.kind == Kind::kOutputs) outputs.push_back(action.stage);
    if (action.is_copy()) {
      SMP_CHECK(!has_begun, at(), "copies come before all computes, transfers and unshards.");
      SMP_CHECK(copied < stages_of(action), at(),
                "copies go in ascending order of owner and reader, each once, so that no ranks "
                "wait for each other.");
      copied = stages_of(action);
    }
    if (action.kind == Kind::kRecall) {
      SMP_CHECK(gone_back.count(microbatch) == 0, at(), "its backward came before.");
      SMP_CHECK(recalled.insert(microbatch).second, at(), "it was recalled already.");
    }
    if (action.makes_input_gradients()) gone_back.insert(microbatch);
    has_begun =
        has_begun || action.is_compute() || action.is_transfer() || action.kind == Kind::kUnshard;
  }
  return outputs;
}

void check_pairs(const Schedule& schedule) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& copy : schedule.actions(rank)) {
      if (!copy.is_copy()) continue;
      const Action other = counterpart(copy);
      const int other_rank = schedule.rank_of(other.stage);
      const auto& there = schedule.actions(other_rank);
      SMP_CHECK(std::find(there.begin(), there.end(), other) != there.end(), "schedule: rank ",
                other_rank, " never does ", to_string(other), ", but rank ", rank, " does ",
                to_string(copy), ". Every copy that is sent is received once.");
    }
  }
}

std::string stages_text(const std::vector<int>& stages) {
  return stages.empty() ? "no stage" : "stage " + c10::Join(", ", stages);
}

}  // namespace

Schedule with_frame(const Schedule& lowered, const Frame& frame) {
  Schedule result = lowered.without_actions();
  for (int rank = 0; rank < lowered.ranks(); ++rank) {
    const auto& actions = lowered.actions(rank);
    auto& all = result.actions(rank);
    all = copies_on(rank, lowered, frame);
    const auto body = inserted(actions, find_recalls(actions, frame.loading_horizon));
    all.insert(all.end(), body.begin(), body.end());
    for (const int stage : frame.outputs) all.push_back(outputs_of(stage));
  }
  return result;
}

void verify_frame(const Schedule& schedule) {
  const std::vector<int> first = check_list(schedule, 0);
  for (int rank = 1; rank < schedule.ranks(); ++rank) {
    const std::vector<int> outputs = check_list(schedule, rank);
    SMP_CHECK(outputs == first, "schedule: rank ", rank, " takes part in the outputs of ",
              stages_text(outputs), ", rank 0 in those of ", stages_text(first),
              ". All ranks take part in all outputs, in one order.");
  }
  check_pairs(schedule);
}

}  // namespace smp::pipeline
