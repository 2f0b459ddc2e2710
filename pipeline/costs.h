// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "pipeline/action.h"

namespace smp::pipeline {

/// Times, or amounts of memory, differ by rounding only if they differ by less than this part of
/// them.
constexpr double kRounding = 1e-9;

/// The costs of a step's parts, for the simulator and the list scheduler: times in any one unit,
/// memory in any other. Everything about time but `forward` may be left empty, see there.
struct StageCosts {
  /// Every action of compute takes 1, also each half of a split backward, and transfers take
  /// nothing: the slots in which `simple` and `interleaved` are made.
  static StageCosts unit(int stages);
  /// The same times for all stages; a whole backward takes `input + weight`. Transfers take
  /// nothing.
  static StageCosts uniform(int stages, double forward = 1, double input = 1, double weight = 1);

  /// Time of one microbatch's forward, by stage.
  std::vector<double> forward;
  /// Time of one microbatch's whole backward, by stage; empty: that of its two halves.
  std::vector<double> backward;
  /// Time of the first half of a split backward, by stage: the gradients of the stage's inputs.
  /// Empty together with `backward_weight` where backwards cannot be split.
  std::vector<double> backward_input;
  /// Time of the second half, by stage: the gradients of the stage's parameters.
  std::vector<double> backward_weight;

  /// Time from the end of a send to the arrival, by edge in the order of the schedule's edges;
  /// empty: none.
  std::vector<double> latency;
  /// The same for the gradients that come back over the edge; empty: as `latency`.
  std::vector<double> backward_latency;
  /// How long a message keeps the rank that sends it from computing, by edge and in both
  /// directions; empty: not at all.
  std::vector<double> send;

  /// Memory that one microbatch keeps from its forward to its backward, by stage; empty: none.
  std::vector<double> kept;
  /// The part of it that a split backward keeps between its halves, by stage; empty: all of it.
  std::vector<double> kept_for_weights;
  /// The memory that the first half of each stage adds before it lets go of the rest: the gradients
  /// that the second half starts from, which are in `kept_for_weights`, too; empty: none.
  std::vector<double> gradients_for_weights;

  /// The time of a compute.
  double of(const Action& compute) const;

  /// Whether the halves of a backward have costs.
  bool can_split() const { return !backward_weight.empty(); }

  /// The same costs with every list that may be empty filled in, except the halves of backwards
  /// that cannot be split. Throws `smp::ConfigError` when a list has another length than `stages`
  /// or `edges`, or a number that is negative or not finite.
  StageCosts filled(size_t stages, size_t edges) const;
};

/// The memory that one rank keeps for backwards, of `StageCosts::kept`. It follows from the order
/// of the rank's list alone, not from time.
class KeptMemory {
 public:
  /// `costs`, filled, outlive it.
  explicit KeptMemory(const StageCosts& costs) : costs_(&costs) {}

  /// The next action of the list, of a stage that has a backward.
  void add(const Action& action);
  double now() const { return now_; }
  double peak() const { return peak_; }

 private:
  const StageCosts* costs_;
  double now_ = 0;
  double peak_ = 0;
};

}  // namespace smp::pipeline
