// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace smp::partitioner {

/// A tensor used by a piece of the program that may lie on another stage than where it was made or
/// used before.
struct PieceUse {
  int piece = 0;
  int previous = -1;    ///< the piece that made or used it before; -1: none, it is there at first
  int64_t cost = 0;     ///< if it crosses, for the stage that sends it and again for the receiver
  int64_t kept = 0;     ///< bytes that the receiver keeps for each microbatch in flight
  int64_t fixed = 0;    ///< bytes that the receiver keeps once
  int64_t sent = 0;     ///< bytes that the sender keeps once
  int64_t foreign = 0;  ///< bytes that count as foreign on a stage of another rank than `owner`
  int owner = -1;       ///< a rank; -1: none
};

/// Pieces of a program in order, to be split into contiguous stages. Only numbers: their meaning is
/// the caller's affair.
///
/// A stage takes the cost of its pieces and of the values that cross into and out of it. A stage of
/// a rank that has k stages counts k times in the maximum, so that the maximum bounds every rank's
/// total.
struct SplitProblem {
  std::vector<int> rank_of_stage;  ///< one entry for each stage
  bool allow_empty = false;        ///< stages without a piece
  int64_t microbatches = 1;
  /// Stop where no split can be better by more than this fraction.
  double gap = 0;

  std::vector<int64_t> cost;     ///< per piece, not negative
  std::vector<int64_t> kept;     ///< per piece: bytes for each microbatch in flight
  std::vector<int64_t> fixed;    ///< per piece: bytes whatever the number of microbatches
  std::vector<int64_t> penalty;  ///< per piece: added once if a stage other than the first begins
  std::vector<PieceUse> uses;    ///< uses by `piece`; `previous` < `piece`

  /// Cut j, between stages j and j+1, is the number of pieces before it and lies in
  /// [earliest[j], latest[j]], which ascend with j.
  std::vector<int> earliest;
  std::vector<int> latest;

  std::vector<int64_t> in_flight;  ///< per stage: microbatches kept at once
  int64_t memory_limit = 0;        ///< bytes of a stage; 0: none

  int stages() const { return static_cast<int>(rank_of_stage.size()); }
};

/// The value of a choice of cuts.
struct SplitScore {
  int64_t foreign = 0;  ///< bytes of owned tensors used on other ranks, once per stage
  int64_t sum = 0;      ///< sum of all stages' times, and the penalties
  int64_t peak = 0;     ///< the maximum, see `SplitProblem`
  int64_t memory = 0;   ///< bytes of the stage that needs most

  /// The time of a step: sum + (microbatches - 1) * peak. One microbatch counts as two: its time
  /// would not depend on the balance at all.
  int64_t step(int64_t microbatches) const {
    return sum + (microbatches > 2 ? microbatches - 1 : 1) * peak;
  }
};

SplitScore score_split(const SplitProblem& problem, const std::vector<int>& cuts);

/// The best cuts, or nothing if none satisfies bounds and memory limit: first the fewest foreign
/// bytes, then the smallest `SplitScore::step`. The same problem gives the same cuts everywhere.
///
/// Exact up to `gap`. Under a bound on the maximum, dynamic programming over (stage, first piece)
/// finds the smallest sum; as it falls when the bound rises, branch and bound over the bounds
/// finds the best of all.
std::optional<std::vector<int>> split(const SplitProblem& problem);

/// The smallest memory limit that some split can keep; nothing if none satisfies the bounds.
std::optional<int64_t> smallest_memory_limit(const SplitProblem& problem);

}  // namespace smp::partitioner
