// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/arg.h>

#include <vector>

#include "pipeline/costs.h"
#include "pipeline/schedule.h"

namespace smp::pipeline {

struct VerifyOptions {
  /// The most microbatches a rank may have in flight; 0 for no bound.
  TORCH_ARG(int, active_microbatches) = 0;
  /// How many messages one channel (directed edge, forward or backward) holds that were sent but
  /// not yet received. A send into a full channel waits. At least 1.
  TORCH_ARG(int, credit) = 1;
  /// The most that a rank may keep for backwards, by rank, in the unit of `costs.kept`, and these
  /// costs; empty: no limit.
  TORCH_ARG(std::vector<double>, memory_limit);
  TORCH_ARG(StageCosts, costs);
};

/// Proves that every rank can run its list to the end and that the result is right. Throws
/// `smp::Error` that names the first rank, position (from 0) and action at fault unless:
///
/// - every action is about stages, microbatches and edges that exist, on the rank of its stage;
/// - every forward, backward, send, receive and reduce happens exactly once; each backward is
///   either whole (B) or split into two halves (I, and later W);
/// - copies, recalls and outputs are where `verify_frame` wants them (those that gather and free
///   parameters are for `verify_unsharding`);
/// - on each stage forwards, input gradients (B or I) and weight gradients (B or W) go in
///   ascending microbatch order, and so do the sends and the receives of each channel;
/// - a forward comes before its backward, a receive before its use, a send after its maker,
///   a reduce after the stage's last weight gradients;
/// - no rank has more than `active_microbatches` in flight, from the first forward of a
///   microbatch on the rank to its last B or W there, since activations are kept until then;
/// - no rank keeps more than its `memory_limit` (but for rounding); this one is a `PartitionError`,
///   and names the action after which the rank keeps most;
/// - there is no deadlock: with channels of `credit` messages all ranks reach their end. The
///   error then names the awaited action of each rank in the circle.
void verify(const Schedule& schedule, const std::vector<StageEdge>& edges,
            const VerifyOptions& options = {});

}  // namespace smp::pipeline
