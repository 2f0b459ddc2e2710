#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace smp::partitioner {

/// A value, or a tensor that a stage owns, used by a piece of the program.
struct PieceUse {
  int piece = 0;
  int previous = -1;  ///< the piece that made or used it before; -1: none, it is there at first
  int64_t bytes = 0;
  int owner = -1;  ///< the stage that owns it; -1: a value that crosses as an activation
};

/// Pieces of a program in order, to be split into contiguous stages. Only numbers: what the
/// pieces are is the caller's affair.
struct SplitProblem {
  int stages = 1;
  bool allow_empty = false;  ///< stages without a piece
  /// How far, as a fraction, the maximum cost may rise above the minimum to save bytes.
  double tolerance = 0;
  std::vector<int64_t> cost;   ///< per piece, not negative
  std::vector<PieceUse> uses;  ///< by `piece`; `previous` < `piece`
  /// Cut j, between stages j and j+1, is the number of pieces before it and lies in
  /// [earliest[j], latest[j]].
  std::vector<int> earliest;
  std::vector<int> latest;
};

/// The best cuts, or nothing if none satisfies the bounds. In this order of importance:
///   1. the fewest bytes of owned tensors used outside their owner's stage, once per stage;
///   2. the smallest maximum cost of a stage (up to `tolerance`);
///   3. the fewest bytes crossing, each value once for every stage that uses it after another;
///   4. the earliest cuts, compared from the first on.
/// Exact, by dynamic programming over (stage, first piece).
std::optional<std::vector<int>> split(const SplitProblem& problem);

}  // namespace smp::partitioner
