// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/host_chunks.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace smp::comm {
namespace {

using Progress = HostBoard::Progress;

uint64_t steps_for(const Slices& slices, size_t chunk_bytes) {
  size_t longest = 0;
  for (const Slice& slice : slices) {
    longest = std::max(longest, slice.bytes());
  }
  return (longest + chunk_bytes - 1) / chunk_bytes;
}

}  // namespace

HostChunks::HostChunks(HostBoard& board, Slices slices)
    : board_(board),
      slices_(std::move(slices)),
      chunk_bytes_(HostBoard::kBufferBytes / slices_.size() / kSliceAlignment * kSliceAlignment),
      steps_(steps_for(slices_, chunk_bytes_)),
      first_step_(board.take_steps(steps_)) {}

Slice HostChunks::chunk(int owner, uint64_t i) const {
  const Slice& slice = slices_[owner];
  const size_t begin = std::min(slice.end, slice.begin + i * chunk_bytes_);
  return {begin, std::min(slice.end, begin + chunk_bytes_)};
}

Slice HostChunks::own_chunk(uint64_t i) const {
  const int rank = board_.rank();
  return rank < static_cast<int>(slices_.size()) ? chunk(rank, i) : Slice{};
}

void HostChunks::stage(uint64_t i, const std::byte* input) const {
  board_.await_buffer(first_step_ + i);
  for (int owner = 0; owner < static_cast<int>(slices_.size()); ++owner) {
    const Slice bytes = chunk(owner, i);
    if (owner != board_.rank() && bytes.bytes() > 0) {
      std::memcpy(buffer(board_.rank(), i, owner), input + bytes.begin, bytes.bytes());
    }
  }
  board_.signal(Progress::kStaged, first_step_ + i);
}

std::vector<const void*> HostChunks::parts(uint64_t i, const std::byte* input) const {
  board_.await_all(Progress::kStaged, first_step_ + i);
  std::vector<const void*> parts;
  for (int rank = 0; rank < board_.ranks(); ++rank) {
    parts.push_back(rank == board_.rank() ? input + own_chunk(i).begin
                                          : buffer(rank, i, board_.rank()));
  }
  return parts;
}

void HostChunks::publish(uint64_t i) const { board_.signal(Progress::kReduced, first_step_ + i); }

void HostChunks::take(uint64_t i, std::byte* output) const {
  for (int owner = 0; output != nullptr && owner < static_cast<int>(slices_.size()); ++owner) {
    const Slice bytes = chunk(owner, i);
    if (owner != board_.rank() && bytes.bytes() > 0) {
      board_.await(Progress::kReduced, first_step_ + i, owner);
      std::memcpy(output + bytes.begin, buffer(owner, i, owner), bytes.bytes());
    }
  }
  board_.signal(Progress::kDone, first_step_ + i);
}

}  // namespace smp::comm
