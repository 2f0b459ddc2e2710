// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "comm/communicator.h"
#include "core/mesh.h"

// How tensors lie on ranks: values, the same on every rank, and functions that cut and join tensors
// accordingly. Nothing is computed, so the bits stay. `rank` is a world rank. Internal.
namespace smp::comm {

/// Dimension `dim` is blocks of these extents, one after the other. Each is divided evenly: a rank
/// has its share of every block.
struct Blocks {
  int64_t dim = 0;
  std::vector<int64_t> extents;

  bool operator==(const Blocks& other) const {
    return dim == other.dim && extents == other.extents;
  }
};

/// In the order of memory, the r-th rank has `length` elements from `r * length - offset` on, as
/// far as there are that many.
struct Range {
  int64_t offset = 0;
  int64_t length = 0;

  /// The first of `numel` elements that a rank has, and the one behind its last.
  std::pair<int64_t, int64_t> of(int index, int64_t numel) const;

  bool operator==(const Range& other) const {
    return offset == other.offset && length == other.length;
  }
};

/// The rank at one position has all, the others nothing. The sizes of a part, and what `cut` makes,
/// are the owner's: `Sharding::is_on` tells the others apart.
struct Owner {
  int position = 0;

  bool operator==(const Owner& other) const { return position == other.position; }
};

/// How ranks divide a tensor that each would have whole without this cut.
struct Cut {
  core::Axis over;
  std::variant<Blocks, Range, Owner> how;

  bool operator==(const Cut& other) const { return over == other.over && how == other.how; }
};

/// Which rank has which elements of a tensor.
struct Sharding {
  std::vector<int64_t> sizes;  ///< the whole's
  std::vector<int64_t> order;  ///< its dimensions in the order of memory, the slowest first
  std::vector<Cut> cuts;       ///< outermost first; after a `Range` none

  /// The sizes of a rank's part after the first cuts; for a range, its length.
  std::vector<int64_t> sizes_of(int rank, size_t count) const;
  std::vector<int64_t> sizes_of(int rank) const { return sizes_of(rank, cuts.size()); }
  /// Whether a rank has something after the first cuts: no other one owns it.
  bool is_on(int rank, size_t count) const;
  bool is_on(int rank) const { return is_on(rank, cuts.size()); }
  /// How the ranks along an axis divide what each would have without their cut; none: they do not,
  /// as where one owns it.
  std::optional<Sharding> along(const core::Axis& axis) const;
  /// Without the cuts of other kinds than these.
  template <class... Hows>
  Sharding only() const {
    Sharding result{sizes, order, {}};
    for (const Cut& cut : cuts) {
      if ((std::holds_alternative<Hows>(cut.how) || ...)) result.cuts.push_back(cut);
    }
    return result;
  }
  /// Throws where a block is not a multiple of its ranks, blocks are not the whole dimension or no
  /// rank has the owner's position, so that elements would be lost, and where a cut follows a
  /// range.
  void check() const;
  /// A rank's part of a tensor that has undergone the first `done` cuts. Parts of blocks are
  /// contiguous copies; a range shares memory that lies in `order`.
  at::Tensor cut(at::Tensor tensor, int rank, size_t done = 0) const;
  /// The inverse of the last cut, given the parts of all its ranks. Ranges that follow each other
  /// in one memory are viewed, not copied.
  at::Tensor join(const std::vector<at::Tensor>& parts) const;

  /// "[192, 64] along dimension 0 in 3 blocks over 2 ranks, then 2048 elements each over 4 ranks".
  std::string to_string() const;
  bool operator==(const Sharding& other) const {
    return sizes == other.sizes && order == other.order && cuts == other.cuts;
  }
};

/// The dimensions of a tensor as its elements lie in memory; where it is not dense, as they are.
std::vector<int64_t> memory_order(const at::Tensor& tensor);

/// This rank's part of a tensor.
struct Part {
  Sharding sharding;
  at::Tensor own;  ///< undefined: nothing, or others get any values for it; unread of no owner
};

/// Undoes the last cut of each of a list in one collective over its ranks, which have the same
/// list: the results on the rank at position `root`, undefined on others, or on all. All own
/// tensors have the dtype and device of `options`. Results share no memory with them, except where
/// one rank owns the whole list: there they may be its own.
std::vector<at::Tensor> join(Communicator& group, const std::vector<Part>& parts,
                             const at::TensorOptions& options, int rank, std::optional<int> root);

}  // namespace smp::comm
