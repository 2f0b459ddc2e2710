// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>
#include <vector>

// Ranks are numbers in mixed radix: a mesh, whose axes are the digits. Groups of ranks are values,
// the same on every rank, made from axes. Internal.
namespace smp::core {

/// Ranks that differ in one digit of their number only, seen from each of them.
struct Axis {
  int stride = 1;  ///< the digit's
  int size = 1;

  /// The position of a rank among those that differ from it.
  int index_of(int rank) const { return rank / stride % size; }
  /// The rank at another position.
  int member(int rank, int index) const { return rank + (index - index_of(rank)) * stride; }
  /// Two axes in its place: runs of `inner` neighbours, and the ranks at one place in all runs.
  std::pair<Axis, Axis> split(int inner) const {
    return {{stride, inner}, {stride * inner, size / inner}};
  }
  bool operator==(const Axis& other) const { return stride == other.stride && size == other.size; }
};

/// Axes folded into one: ranks that differ in these digits only, in ascending order.
struct Axes {
  std::vector<Axis> digits;  ///< the slowest first

  int size() const;
  int index_of(int rank) const;
  std::vector<int> members(int rank) const;
};

}  // namespace smp::core
