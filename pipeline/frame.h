// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "graph/graph.h"
#include "pipeline/schedule.h"

namespace smp::pipeline {

/// The needs of a step besides its computes and their messages: a description by stages, equal on
/// all ranks.
struct Frame {
  /// Parameters and buffers that one stage owns and a stage of another rank reads, too. The
  /// reader's rank has copies, which are made anew at the beginning of a step: an optimizer may
  /// have changed a parameter since, a step a buffer.
  struct Copy {
    int from = 0;
    int to = 0;
    std::vector<graph::ValueId> values = {};
  };

  std::vector<Copy> copies;  ///< in ascending order of (from, to)
  /// The stages whose outputs go to all ranks, in the order in which they do.
  std::vector<int> outputs;
  /// How many computes before its backward a microbatch is recalled from a store; 0: nothing goes
  /// there.
  int loading_horizon = 0;
};

/// Adds to a lowered schedule the actions of the frame: first the copies; recalls before computes;
/// at the end the outputs, on every rank.
Schedule with_frame(const Schedule& lowered, const Frame& frame);

/// Throws `smp::Error` that names the first rank, position and action at fault unless:
///
/// - copies come before all computes, transfers and unshards, so that nothing is gathered beside a
///   parameter on its way; each is sent once and received once, and every rank has them in
///   ascending order of (owner, reader). Then the first copy that is left has both of its ranks
///   ready, so that none waits for ever, whatever a send waits for;
/// - each microbatch is recalled at most once on a stage, before its backward;
/// - the outputs are the last actions, the same in the same order on all ranks.
///
/// Actions are well formed (`verify`).
void verify_frame(const Schedule& schedule);

}  // namespace smp::pipeline
