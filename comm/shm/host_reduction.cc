#include "comm/shm/host_reduction.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/reduce.h"

namespace smp::comm {
namespace {

constexpr size_t kLine = 64;

using Kind = Collective::Kind;
using Progress = HostBoard::Progress;

std::vector<Slice> slices_of(const Collective& call, int ranks) {
  if (call.kind != Kind::kReduceScatter) {
    return even_slices(ranks, call.input.nbytes());
  }
  std::vector<Slice> slices;
  for (int rank = 0; rank < ranks; ++rank) {
    slices.push_back({rank * call.output.nbytes(), (rank + 1) * call.output.nbytes()});
  }
  return slices;
}

}  // namespace

std::vector<Slice> even_slices(int ranks, size_t bytes) {
  const size_t lines = (bytes + kLine - 1) / kLine;
  const size_t even = (lines + ranks - 1) / ranks * kLine;
  std::vector<Slice> slices;
  for (int rank = 0; rank < ranks; ++rank) {
    slices.push_back({std::min(bytes, rank * even), std::min(bytes, (rank + 1) * even)});
  }
  return slices;
}

Pieces::Pieces(std::vector<Slice> slices)
    : slices_(std::move(slices)),
      piece_bytes_(HostBoard::kBufferBytes / slices_.size() / kLine * kLine) {}

uint32_t Pieces::steps() const {
  size_t longest = 0;
  for (const Slice& slice : slices_) {
    longest = std::max(longest, slice.bytes());
  }
  return static_cast<uint32_t>((longest + piece_bytes_ - 1) / piece_bytes_);
}

Slice Pieces::piece(int owner, uint32_t step) const {
  const Slice& slice = slices_[owner];
  const size_t begin = std::min(slice.end, slice.begin + step * piece_bytes_);
  return {begin, std::min(slice.end, begin + piece_bytes_)};
}

HostReduction::HostReduction(const Collective& call, HostBoard& board)
    : call_(call),
      board_(board),
      input_(static_cast<const std::byte*>(call.input.const_data_ptr())),
      output_(call.writes(board.rank()) ? static_cast<std::byte*>(call.output.mutable_data_ptr())
                                        : nullptr),
      pieces_(slices_of(call, board.ranks())) {}

void HostReduction::run(Way way) {
  switch (way) {
    case Way::kSmall:
      return run_small();
    case Way::kDirect:
      return run_direct();
    case Way::kBuffers:
      return run_through_buffers();
  }
}

void HostReduction::run_small() {
  if (output_ == nullptr) {
    return;
  }
  const Slice wanted =
      call_.kind == Kind::kReduceScatter ? pieces_.slice(me()) : Slice{0, call_.input.nbytes()};
  std::vector<const void*> parts;
  for (int rank = 0; rank < board_.ranks(); ++rank) {
    parts.push_back(board_.small(rank) + wanted.begin);
  }
  reduce_into({output_}, parts, wanted.bytes());
}

// Only the owner of a slice touches it in any tensor, until all are done.
void HostReduction::run_direct() {
  const Slice own = pieces_.slice(me());
  std::vector<const void*> parts;
  std::vector<void*> outputs;
  if (call_.kind == Kind::kReduceScatter) {
    outputs.push_back(output_);
  }
  for (int rank = 0; rank < board_.ranks(); ++rank) {
    std::byte* const theirs = address_of(board_.card(rank).place) + own.begin;
    parts.push_back(theirs);
    if (all_get_it() || rank == call_.root) {
      outputs.push_back(theirs);
    }
  }
  reduce_into(outputs, parts, own.bytes());
  const uint32_t step = board_.take_steps(1);
  board_.signal(Progress::kDone, step);
  board_.await_all(Progress::kDone, step);
}

// Every rank stages a piece while it is ahead of the one that it reduces, which is ahead of the one
// that it takes, so that nobody waits for what another has only just begun.
void HostReduction::run_through_buffers() {
  const uint32_t steps = pieces_.steps();
  first_step_ = board_.take_steps(steps);
  for (uint32_t i = 0; i < steps + 2; ++i) {
    if (i < steps) {
      stage(i);
    }
    if (i >= 1 && i - 1 < steps) {
      reduce(i - 1);
    }
    if (i >= 2) {
      take(i - 2);
    }
  }
}

void HostReduction::stage(uint32_t i) {
  const uint32_t step = first_step_ + i;
  board_.await_all(Progress::kDone, step - HostBoard::kBuffers);
  for (int owner = 0; owner < board_.ranks(); ++owner) {
    const Slice piece = pieces_.piece(owner, i);
    if (owner != me() && piece.bytes() > 0) {
      std::memcpy(board_.buffer(me(), step) + pieces_.offset(owner), input_ + piece.begin,
                  piece.bytes());
    }
  }
  board_.signal(Progress::kStaged, step);
}

// Where this rank's own slice of the result goes, from byte `begin` of the input on.
std::byte* HostReduction::own_result(size_t begin) const {
  return call_.kind == Kind::kReduceScatter ? output_ + (begin - pieces_.slice(me()).begin)
                                            : output_ + begin;
}

void HostReduction::reduce(uint32_t i) {
  const uint32_t step = first_step_ + i;
  board_.await_all(Progress::kStaged, step);
  const Slice own = pieces_.piece(me(), i);
  if (own.bytes() > 0) {
    const auto buffer = [&](int rank) { return board_.buffer(rank, step) + pieces_.offset(me()); };
    std::vector<const void*> parts;
    for (int rank = 0; rank < board_.ranks(); ++rank) {
      parts.push_back(rank == me() ? input_ + own.begin : buffer(rank));
    }
    std::vector<void*> outputs;
    if (output_ != nullptr) {
      outputs.push_back(own_result(own.begin));
    }
    if (all_get_it() || output_ == nullptr) {
      outputs.push_back(buffer(me()));
    }
    reduce_into(outputs, parts, own.bytes());
  }
  board_.signal(Progress::kReduced, step);
}

void HostReduction::take(uint32_t i) {
  const uint32_t step = first_step_ + i;
  for (int owner = 0; takes_all() && owner < board_.ranks(); ++owner) {
    const Slice piece = pieces_.piece(owner, i);
    if (owner != me() && piece.bytes() > 0) {
      board_.await(Progress::kReduced, step, owner);
      std::memcpy(output_ + piece.begin, board_.buffer(owner, step) + pieces_.offset(owner),
                  piece.bytes());
    }
  }
  board_.signal(Progress::kDone, step);
}

void HostReduction::reduce_into(const std::vector<void*>& outputs,
                                const std::vector<const void*>& parts, size_t bytes) const {
  if (bytes > 0) {
    reduce_in_order(outputs, parts, bytes / call_.input.element_size(), call_.input.scalar_type(),
                    call_.op, board_.ranks());
  }
}

}  // namespace smp::comm
