// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "nn/rewrite/propagate.h"

namespace smp::nn::rewrite {

/// Which activations between divided layers are divided, and the resulting graph.
struct ResidualStreams {
  Outcome outcome;
  std::vector<ResidualStreamDecision> decisions;
};

/// Goes through the activations that all ranks have whole although they come from sums over the
/// ranks, or are read by divided products. Each is tried in parts along its dimensions but the
/// last, outermost first, together with all others that meet it element for element: they are
/// constrained where they come from, so that sums over the ranks become sums to parts. The try that
/// is best by predicted time and kept bytes (`DivideOptions::activation_us_per_byte`) is kept if it
/// is better than whole ones. `constraints` say how parameters are divided.
ResidualStreams choose_residual_streams(Propagation& propagation, const Constraints& constraints,
                                        const DivideOptions& options);

}  // namespace smp::nn::rewrite
