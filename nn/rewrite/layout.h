#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>

namespace smp::nn::rewrite {

/// How a tensor of the whole graph lies on the ranks of a tensor-parallel group.
///
/// A divided tensor has one *digit*: number its elements in row-major order; those with
/// `(number / stride) % ranks == r` are rank r's, in their order. `dim` and `blocks` say the same
/// in the terms of `ParameterSplit`: dimension `dim` is `blocks` equal blocks, of each of which a
/// rank has its part, so `stride` is the elements of one part times those of the dimensions behind.
/// Taking a digit out keeps the row-major order, so a view of the whole is a view of each part.
struct Layout {
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

using Sizes = c10::SmallVector<int64_t, 5>;

/// True if dimension `dim` is made of `blocks * ranks` equal parts of at least one element.
bool can_divide(c10::IntArrayRef sizes, int dim, int64_t blocks, int ranks);

/// The sizes that each rank holds of a tensor with `sizes`.
Sizes local_sizes(c10::IntArrayRef sizes, const Layout& layout, int ranks);

/// The elements between two that differ by one in the digit of a divided tensor.
int64_t stride_of(c10::IntArrayRef sizes, const Layout& layout, int ranks);

/// The layout of a tensor with sizes `to` that has the elements, in row-major order, of one with
/// sizes `from` in a divided layout; nothing if the digit does not lie within one dimension of
/// `to`.
std::optional<Layout> through_view(c10::IntArrayRef from, const Layout& layout, c10::IntArrayRef to,
                                   int ranks);

/// Into how many parts the sizes `to` could divide the digit that `through_view` did not find
/// there: 12 for rows of 12 heads, whatever the number of ranks.
int64_t parts_in_view(c10::IntArrayRef from, const Layout& layout, c10::IntArrayRef to, int ranks);

}  // namespace smp::nn::rewrite
