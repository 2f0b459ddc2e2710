// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "comm/collective.h"
#include "comm/shm/host_board.h"
#include "comm/slices.h"

namespace smp::comm {

/// One all_reduce, reduce or reduce_scatter of ranks of one host, which have published their calls.
class HostReduction {
 public:
  HostReduction(const Collective& call, HostBoard& board);

  void run(Protocol protocol);

 private:
  void run_eager();
  void run_zero_copy();
  void run_pipelined();

  bool all_get_it() const { return call_.kind == Collective::Kind::kAllReduce; }
  void reduce_into(const std::vector<void*>& outputs, const std::vector<const void*>& parts,
                   size_t bytes) const;

  const Collective& call_;
  HostBoard& board_;
  const std::byte* const input_;
  std::byte* const output_;  // null where the result is not wanted
  Slices slices_;            // slices of the ranks; the chunks take them
  const Slice own_;          // the slice that this rank reduces, where each reduces one
};

}  // namespace smp::comm
