// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>

#include "smp/nn/layout.h"

namespace smp::nn::rewrite {

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
