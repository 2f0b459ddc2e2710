// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "partitioner/pins.h"

namespace smp::partitioner {

/// The stages of a pipeline in program order, and which of them each pinned operator is in.
struct StageList {
  std::vector<int> rank_of_stage;
  std::vector<int> stage_of_pin;
};

/// A stage for each run of pins on one rank, so that a rank to which the pins return has several;
/// and one for each rank that no pin names, placed so that ranks ascend where they can: before the
/// first place where a lower rank is followed by a higher one, else at the end. Without pins: one
/// stage for each rank.
///
/// `placement` is the wanted rank of each stage (a rank may have several), empty for none. It is
/// followed if the pins can be kept in it: each is then in the first of its rank's stages that is
/// not before the pins before it.
StageList list_stages(const std::vector<Pin>& pins, int ranks,
                      const std::vector<int>& placement = {});

}  // namespace smp::partitioner
