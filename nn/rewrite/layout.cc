// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/layout.h"

#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include "core/check.h"

namespace smp::nn {

std::string Layout::to_string() const {
  if (is_whole()) return "whole";
  if (is_partial()) return "partial";
  if (!is_divided()) return "shared";
  return c10::str("divided(", dim, blocks > 1 ? c10::str(", ", blocks, " blocks") : "", ")");
}

namespace rewrite {

bool can_divide(c10::IntArrayRef sizes, int dim, int64_t blocks, int ranks) {
  return dim >= 0 && dim < static_cast<int>(sizes.size()) && blocks >= 1 && sizes[dim] > 0 &&
         sizes[dim] % (blocks * ranks) == 0;
}

Sizes local_sizes(c10::IntArrayRef sizes, const Layout& layout, int ranks) {
  Sizes local(sizes.begin(), sizes.end());
  if (!layout.is_divided()) return local;
  SMP_INTERNAL_ASSERT(can_divide(sizes, layout.dim, layout.blocks, ranks), sizes, " as ",
                      layout.to_string(), " over ", ranks, " ranks");
  local[layout.dim] /= ranks;
  return local;
}

int64_t stride_of(c10::IntArrayRef sizes, const Layout& layout, int ranks) {
  return sizes[layout.dim] / (layout.blocks * ranks) *
         c10::multiply_integers(sizes.slice(layout.dim + 1));
}

std::optional<Layout> through_view(c10::IntArrayRef from, const Layout& layout, c10::IntArrayRef to,
                                   int ranks) {
  const int64_t stride = stride_of(from, layout, ranks);
  if (stride == 0) return std::nullopt;  // no elements
  for (size_t d = 0; d < to.size(); ++d) {
    const int64_t inner = c10::multiply_integers(to.slice(d + 1));
    if (inner == 0 || stride % inner != 0) continue;
    const int64_t part = stride / inner;
    if (to[d] == 0 || to[d] % (part * ranks) != 0) continue;
    return Layout::divided(static_cast<int>(d), to[d] / (part * ranks));
  }
  return std::nullopt;
}

int64_t parts_in_view(c10::IntArrayRef from, const Layout& layout, c10::IntArrayRef to, int ranks) {
  const int64_t block = stride_of(from, layout, ranks) * ranks;
  for (size_t d = to.size(); d-- > 0;) {
    const int64_t inner = c10::multiply_integers(to.slice(d + 1));
    if (inner > 0 && to[d] * inner >= block) return block / inner;
  }
  return 1;
}

}  // namespace rewrite
}  // namespace smp::nn
