// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/shm/host_board.h"
#include "comm/slices.h"

namespace smp::comm {

/// Passes tensors of one size through the board's buffers: the ranks of a host give them to those
/// that reduce them, and get the results back. A tensor is cut into slices, one for each owner (the
/// first ranks of the host); in each step a chunk of every slice passes, and a buffer has room for
/// one chunk of each owner.
///
/// A rank makes three calls for each step, and should make those of different steps in turn, so
/// that no rank waits for a step that another has only just begun: stage(), then the owner's
/// parts() and publish(), then take().
class HostChunks {
 public:
  /// Takes the board's steps. All ranks give the same slices.
  HostChunks(HostBoard& board, Slices slices);

  /// Until all slices are through.
  uint64_t steps() const { return steps_; }

  /// The part of this rank's slice that passes in step `i`; empty where it owns none.
  Slice own_chunk(uint64_t i) const;

  /// Copies the parts that the others reduce from `input` to this rank's buffer.
  void stage(uint64_t i, const std::byte* input) const;

  /// All ranks' values of own_chunk(i), by rank, when they are there; this rank's own are in
  /// `input`.
  std::vector<const void*> parts(uint64_t i, const std::byte* input) const;

  /// Where this rank leaves the result of own_chunk(i) for the others before publish().
  std::byte* own_result(uint64_t i) const { return buffer(board_.rank(), i, board_.rank()); }
  void publish(uint64_t i) const;

  /// Copies the others' results to `output`, when they are there; null: nothing is wanted.
  void take(uint64_t i, std::byte* output) const;

 private:
  Slice chunk(int owner, uint64_t i) const;
  std::byte* buffer(int rank, uint64_t i, int owner) const {
    return board_.buffer(rank, first_step_ + i) + owner * chunk_bytes_;
  }

  HostBoard& board_;
  const Slices slices_;  // slices by owner
  const size_t chunk_bytes_;
  uint64_t steps_;
  uint64_t first_step_;
};

}  // namespace smp::comm
