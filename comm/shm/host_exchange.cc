// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/host_exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace smp::comm {
namespace {

using Kind = Collective::Kind;
using Progress = HostBoard::Progress;

}  // namespace

HostExchange::HostExchange(const Collective& call, HostBoard& board) : call_(call), board_(board) {
  const int me = board.rank();
  if (!call.writes(me)) {
    return;
  }
  auto* const output = static_cast<std::byte*>(call.output.mutable_data_ptr());
  switch (call.kind) {
    case Kind::kBroadcast:
      fetch(call.root, 0, call.output.nbytes(), output);
      break;
    case Kind::kScatter:
      fetch(call.root, me * call.output.nbytes(), call.output.nbytes(), output);
      break;
    case Kind::kAllToAll: {
      std::byte* to = output;
      for (int rank = 0; rank < board.ranks(); ++rank) {
        const int64_t* const sends = board.splits(rank);
        const int64_t before = std::accumulate(sends, sends + me, int64_t{0});
        const size_t bytes = sends[me] * call.output.element_size();
        fetch(rank, before * call.output.element_size(), bytes, to);
        to += bytes;
      }
      break;
    }
    default:  // gather and all_gather
      for (int rank = 0; rank < board.ranks(); ++rank) {
        fetch(rank, 0, call.input.nbytes(), output + rank * call.input.nbytes());
      }
  }
}

void HostExchange::fetch(int rank, size_t begin, size_t bytes, std::byte* to) {
  if (bytes > 0) {
    fetches_.push_back({rank, begin, bytes, to});
  }
}

void HostExchange::run(Protocol protocol) {
  take_own();
  if (protocol == Protocol::kPipelined) {
    return run_pipelined();
  }
  for (const Fetch& fetch : fetches_) {
    if (fetch.rank != board_.rank()) {
      const std::byte* const theirs = protocol == Protocol::kEager
                                          ? board_.eager_data(fetch.rank)
                                          : address_of(board_.record(fetch.rank).place);
      std::memcpy(fetch.to, theirs + fetch.begin, fetch.bytes);
    }
  }
  if (protocol == Protocol::kZeroCopy) {
    const uint64_t step = board_.take_steps(1);
    board_.signal(Progress::kDone, step);
    board_.await_all(Progress::kDone, step);
  }
}

void HostExchange::take_own() const {
  for (const Fetch& fetch : fetches_) {
    if (fetch.rank == board_.rank()) {
      const auto* from = static_cast<const std::byte*>(call_.input.const_data_ptr()) + fetch.begin;
      if (from != fetch.to) {
        std::memcpy(fetch.to, from, fetch.bytes);
      }
    }
  }
}

// Every rank stages a chunk while it is one ahead of the chunks that it takes.
void HostExchange::run_pipelined() {
  size_t longest = 0;
  for (int rank = 0; rank < board_.ranks(); ++rank) {
    longest = std::max<size_t>(longest, board_.record(rank).input_bytes);
  }
  const uint64_t chunks = (longest + HostBoard::kBufferBytes - 1) / HostBoard::kBufferBytes;
  const uint64_t first = board_.take_steps(chunks);
  for (uint64_t i = 0; i < chunks + 1; ++i) {
    if (i < chunks) {
      stage(first + i, i);
    }
    if (i >= 1) {
      take(first + i - 1, i - 1);
    }
  }
}

void HostExchange::stage(uint64_t step, size_t chunk) const {
  const size_t total = board_.record(board_.rank()).input_bytes;
  const size_t begin = chunk * HostBoard::kBufferBytes;
  if (begin < total) {
    board_.await_buffer(step);
    const auto* const input = static_cast<const std::byte*>(call_.input.const_data_ptr());
    std::memcpy(board_.buffer(board_.rank(), step), input + begin,
                std::min(HostBoard::kBufferBytes, total - begin));
  }
  board_.signal(Progress::kStaged, step);
}

void HostExchange::take(uint64_t step, size_t chunk) const {
  const size_t chunk_begin = chunk * HostBoard::kBufferBytes;
  for (const Fetch& fetch : fetches_) {
    const size_t begin = std::max(fetch.begin, chunk_begin);
    const size_t end = std::min(fetch.begin + fetch.bytes, chunk_begin + HostBoard::kBufferBytes);
    if (fetch.rank != board_.rank() && begin < end) {
      board_.await(Progress::kStaged, step, fetch.rank);
      std::memcpy(fetch.to + (begin - fetch.begin),
                  board_.buffer(fetch.rank, step) + (begin - chunk_begin), end - begin);
    }
  }
  board_.signal(Progress::kDone, step);
}

}  // namespace smp::comm
