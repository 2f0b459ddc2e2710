// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/host_reduction.h"

#include <utility>

#include "comm/reduce.h"
#include "comm/shm/host_chunks.h"

namespace smp::comm {
namespace {

using Kind = Collective::Kind;
using Progress = HostBoard::Progress;

Slices slices_of(const Collective& call, int ranks) {
  return call.kind == Kind::kReduceScatter ? equal_slices(ranks, call.output.nbytes())
                                           : even_slices(ranks, call.input.nbytes());
}

}  // namespace

HostReduction::HostReduction(const Collective& call, HostBoard& board)
    : call_(call),
      board_(board),
      input_(static_cast<const std::byte*>(call.input.const_data_ptr())),
      output_(call.writes(board.rank()) ? static_cast<std::byte*>(call.output.mutable_data_ptr())
                                        : nullptr),
      slices_(slices_of(call, board.ranks())),
      own_(slices_[board.rank()]) {}

void HostReduction::run(Protocol protocol) {
  switch (protocol) {
    case Protocol::kEager:
      return run_eager();
    case Protocol::kZeroCopy:
      return run_zero_copy();
    case Protocol::kPipelined:
      return run_pipelined();
  }
}

// Every rank reduces all that it wants itself, which for small data is faster than another wait.
void HostReduction::run_eager() {
  if (output_ == nullptr) {
    return;
  }
  const Slice wanted = call_.kind == Kind::kReduceScatter ? own_ : Slice{0, call_.input.nbytes()};
  std::vector<const void*> parts;
  for (int rank = 0; rank < board_.ranks(); ++rank) {
    parts.push_back(board_.eager_data(rank) + wanted.begin);
  }
  reduce_into({output_}, parts, wanted.bytes());
}

// Only the owner of a slice touches it in any tensor, until all are done.
void HostReduction::run_zero_copy() {
  std::vector<const void*> parts;
  std::vector<void*> outputs;
  if (call_.kind == Kind::kReduceScatter) {
    outputs.push_back(output_);
  }
  for (int rank = 0; rank < board_.ranks(); ++rank) {
    std::byte* const theirs = address_of(board_.record(rank).place) + own_.begin;
    parts.push_back(theirs);
    if (all_get_it() || rank == call_.root) {
      outputs.push_back(theirs);
    }
  }
  reduce_into(outputs, parts, own_.bytes());
  const uint64_t step = board_.take_steps(1);
  board_.signal(Progress::kDone, step);
  board_.await_all(Progress::kDone, step);
}

void HostReduction::run_pipelined() {
  const HostChunks chunks(board_, std::move(slices_));
  const bool scatters = call_.kind == Kind::kReduceScatter;
  const auto reduce = [&](uint64_t i) {
    const std::vector<const void*> parts = chunks.parts(i, input_);
    const Slice chunk = chunks.own_chunk(i);
    std::vector<void*> outputs;
    if (output_ != nullptr) {
      outputs.push_back(output_ + chunk.begin - (scatters ? own_.begin : 0));
    }
    if (all_get_it() || output_ == nullptr) {
      outputs.push_back(chunks.own_result(i));
    }
    reduce_into(outputs, parts, chunk.bytes());
    chunks.publish(i);
  };
  for (uint64_t i = 0; i < chunks.steps() + 2; ++i) {
    if (i < chunks.steps()) {
      chunks.stage(i, input_);
    }
    if (i >= 1 && i - 1 < chunks.steps()) {
      reduce(i - 1);
    }
    if (i >= 2) {
      chunks.take(i - 2, scatters ? nullptr : output_);
    }
  }
}

void HostReduction::reduce_into(const std::vector<void*>& outputs,
                                const std::vector<const void*>& parts, size_t bytes) const {
  if (bytes > 0) {
    reduce_in_order(outputs, parts, bytes / call_.input.element_size(), call_.input.scalar_type(),
                    call_.op, board_.ranks());
  }
}

}  // namespace smp::comm
