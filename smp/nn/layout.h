// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "smp/export.h"

namespace smp::nn {

/// How a tensor of the whole graph lies on the ranks of a tensor-parallel group.
///
/// A divided tensor has one *digit*: number its elements in row-major order; those with
/// `(number / stride) % ranks == r` are rank r's, in their order. `dim` and `blocks` say the same
/// in the terms of `ParameterSplit`: dimension `dim` is `blocks` equal blocks, of each of which a
/// rank has its part, so `stride` is the elements of one part times those of the dimensions behind.
/// Taking a digit out keeps the row-major order, so a view of the whole is a view of each part.
struct SMP_API Layout {
  enum class Kind : uint8_t {
    kWhole,    ///< every rank has all of it, and all of its gradient
    kShared,   ///< every rank has all of it, and a part of the sum that is its gradient
    kDivided,  ///< every rank has its part, and that part of the gradient
    kPartial,  ///< the sum over the ranks is the value; every rank has all of the gradient
  };
  Kind kind = Kind::kWhole;
  int dim = 0;         ///< kDivided only
  int64_t blocks = 1;  ///< kDivided only

  static Layout whole() { return {}; }
  static Layout shared() { return {Kind::kShared, 0, 1}; }
  static Layout partial() { return {Kind::kPartial, 0, 1}; }
  static Layout divided(int dim, int64_t blocks = 1) { return {Kind::kDivided, dim, blocks}; }

  /// The same cut along another dimension.
  Layout along(int other) const {
    Layout moved = *this;
    moved.dim = other;
    return moved;
  }

  bool is_whole() const { return kind == Kind::kWhole; }
  bool is_divided() const { return kind == Kind::kDivided; }
  bool is_partial() const { return kind == Kind::kPartial; }

  /// "whole", "shared", "partial", "divided(1)", "divided(1, 3 blocks)".
  std::string to_string() const;

  bool operator==(const Layout& other) const {
    return kind == other.kind && dim == other.dim && blocks == other.blocks;
  }
  bool operator!=(const Layout& other) const { return !(*this == other); }
};

}  // namespace smp::nn
