// SPDX-License-Identifier: Apache-2.0
#include "partitioner/stage_list.h"

#include <algorithm>
#include <cstddef>
#include <optional>

namespace smp::partitioner {

namespace {

/// Nothing if the pins go back to a rank more often than the placement does.
std::optional<StageList> place(const std::vector<Pin>& pins, const std::vector<int>& placement) {
  StageList list{placement, {}};
  auto stage = placement.begin();
  for (const Pin& pin : pins) {
    stage = std::find(stage, placement.end(), pin.rank);
    if (stage == placement.end()) return std::nullopt;
    list.stage_of_pin.push_back(static_cast<int>(stage - placement.begin()));
  }
  return list;
}

}  // namespace

StageList list_stages(const std::vector<Pin>& pins, int ranks, const std::vector<int>& placement) {
  if (!placement.empty()) {
    if (auto placed = place(pins, placement)) return *placed;
  }
  StageList list;
  for (const Pin& pin : pins) {
    if (list.rank_of_stage.empty() || list.rank_of_stage.back() != pin.rank) {
      list.rank_of_stage.push_back(pin.rank);
    }
    list.stage_of_pin.push_back(static_cast<int>(list.rank_of_stage.size()) - 1);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    auto& stages = list.rank_of_stage;
    if (std::find(stages.begin(), stages.end(), rank) != stages.end()) continue;
    size_t place = 0;
    while (place < stages.size() &&
           !(stages[place] > rank && (place == 0 || stages[place - 1] < rank))) {
      ++place;
    }
    stages.insert(stages.begin() + static_cast<std::ptrdiff_t>(place), rank);
    for (int& stage : list.stage_of_pin) stage += stage >= static_cast<int>(place) ? 1 : 0;
  }
  return list;
}

}  // namespace smp::partitioner
