// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "comm/collective.h"
#include "comm/shm/host_board.h"

namespace smp::comm {

/// One collective of ranks of one host that moves data and combines none; they have published their
/// calls. Every rank offers its input as a whole, and copies the parts that it needs of the
/// others'.
class HostExchange {
 public:
  HostExchange(const Collective& call, HostBoard& board);

  void run(Protocol protocol);

 private:
  // The part of another rank's input that this rank takes.
  struct Fetch {
    int rank;
    size_t begin;
    size_t bytes;
    std::byte* to;
  };

  void fetch(int rank, size_t begin, size_t bytes, std::byte* to);
  void take_own() const;
  void run_pipelined();
  void stage(uint64_t step, size_t chunk) const;
  void take(uint64_t step, size_t chunk) const;

  const Collective& call_;
  HostBoard& board_;
  std::vector<Fetch> fetches_;  // in the order of ranks
};

}  // namespace smp::comm
