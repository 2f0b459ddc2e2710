// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/store/socket.h"

namespace smp::comm {

/// What a rank tells the others about itself.
struct RankRecord {
  std::string host;       ///< The same for ranks that can share memory, and for no others.
  std::string host_name;  ///< For people, and for the topology: as unequal as `host`.
  std::string address;    ///< Where other hosts reach it.
  uint16_t port = 0;
  cpu_set_t cores{};  ///< Those that it may run on.
};

/// A rank's connections to all others.
struct Meeting {
  std::vector<RankRecord> ranks;
  std::vector<Descriptor> connections;  ///< By rank; this rank's own is empty.
};

/// Meets the other ranks at the store and connects to each. Collective. Every rank throws a
/// `TimeoutError` that names the ranks that have not come within `timeout`, and a `CommError` when
/// a rank that has come cannot be reached.
Meeting meet(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout);

}  // namespace smp::comm
