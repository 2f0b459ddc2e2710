#pragma once

#include <cstddef>
#include <vector>

#include "comm/collective.h"
#include "comm/shm/host_board.h"

namespace smp::comm {

/// One collective of ranks of one host that moves data and combines none; they have shown their
/// cards. Every rank gives its input as a whole, and takes what it wants of the others'.
class HostExchange {
 public:
  HostExchange(const Collective& call, HostBoard& board);

  void run(Way way);

 private:
  // What this rank wants of another's input.
  struct Want {
    int rank;
    size_t begin;
    size_t bytes;
    std::byte* to;
  };

  void want(int rank, size_t begin, size_t bytes, std::byte* to);
  void take_own() const;
  void run_through_buffers();
  void stage(uint32_t step, size_t piece) const;
  void take(uint32_t step, size_t piece) const;

  const Collective& call_;
  HostBoard& board_;
  std::vector<Want> wants_;  // in the order of ranks
};

}  // namespace smp::comm
