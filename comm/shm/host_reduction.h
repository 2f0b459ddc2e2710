#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/collective.h"
#include "comm/shm/host_board.h"

namespace smp::comm {

/// The bytes [begin, end) of a tensor that one rank reduces; the last ranks' may be empty.
struct Slice {
  size_t begin = 0;
  size_t end = 0;
  size_t bytes() const { return end - begin; }
};

/// Slices of about the same length that start at multiples of 64 bytes, by rank.
std::vector<Slice> even_slices(int ranks, size_t bytes);

/// How slices pass through the ranks' buffers: in each step a piece of every slice. A buffer has
/// room for one piece of each owner.
class Pieces {
 public:
  explicit Pieces(std::vector<Slice> slices);

  int owners() const { return static_cast<int>(slices_.size()); }
  const Slice& slice(int owner) const { return slices_[owner]; }

  /// Steps until all slices are through.
  uint32_t steps() const;

  /// What of an owner's slice passes in the `step`-th step, from 0; may be empty.
  Slice piece(int owner, uint32_t step) const;

  /// Where it is in a buffer.
  size_t offset(int owner) const { return owner * piece_bytes_; }

 private:
  std::vector<Slice> slices_;
  size_t piece_bytes_;
};

/// One all_reduce, reduce or reduce_scatter of ranks of one host, which have shown their cards.
class HostReduction {
 public:
  HostReduction(const Collective& call, HostBoard& board);

  void run(Way way);

 private:
  void run_small();
  void run_direct();
  void run_through_buffers();

  // What is done to the pieces of the i-th step.
  void stage(uint32_t i);
  void reduce(uint32_t i);
  void take(uint32_t i);

  bool all_get_it() const { return call_.kind == Collective::Kind::kAllReduce; }
  bool takes_all() const {
    return output_ != nullptr && call_.kind != Collective::Kind::kReduceScatter;
  }
  int me() const { return board_.rank(); }
  void reduce_into(const std::vector<void*>& outputs, const std::vector<const void*>& parts,
                   size_t bytes) const;
  std::byte* own_result(size_t begin) const;

  const Collective& call_;
  HostBoard& board_;
  const std::byte* const input_;
  std::byte* const output_;  // null where the result is not wanted
  const Pieces pieces_;
  uint32_t first_step_ = 0;
};

}  // namespace smp::comm
