// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace smp::comm {

/// The bytes [begin, end) of a tensor; may be empty.
struct Slice {
  size_t begin = 0;
  size_t end = 0;
  size_t bytes() const { return end - begin; }
};
using Slices = std::vector<Slice>;  ///< Slices by rank.

/// Where slices begin: vector instructions and cache lines of different ranks do not overlap.
constexpr size_t kSliceAlignment = 64;

/// Slices of about the same length that start at multiples of 64 bytes; the last may be empty.
inline Slices even_slices(int ranks, size_t bytes) {
  const size_t lines = (bytes + kSliceAlignment - 1) / kSliceAlignment;
  const size_t length = (lines + ranks - 1) / ranks * kSliceAlignment;
  Slices slices;
  for (int rank = 0; rank < ranks; ++rank) {
    slices.push_back({std::min(bytes, rank * length), std::min(bytes, (rank + 1) * length)});
  }
  return slices;
}

/// Slices of `length` bytes each.
inline Slices equal_slices(int ranks, size_t length) {
  Slices slices;
  for (int rank = 0; rank < ranks; ++rank) {
    slices.push_back({rank * length, (rank + 1) * length});
  }
  return slices;
}

}  // namespace smp::comm
